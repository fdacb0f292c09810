"""The guide is complete: every statement is mapped, every experiment is on a page, and no figure is typed by hand."""

import re

from clearhead.lab.registry import all_experiments
from tools.guide import DOCS, committed, pages, statements

SOURCE = DOCS.parent / "src" / "clearhead"
NOTES = ("notes.md", "notes.zh-CN.md")


def test_all_150_statements_are_mapped() -> None:
    rows = statements()
    assert [int(row[0]) for row in rows] == list(range(1, 151))
    sections = set(re.findall(r'<a id="([\w-]+)">', (DOCS / "notes.md").read_text(encoding="utf-8")))
    for number, section, code, status, english, chinese in rows:
        assert section in sections, number
        assert (SOURCE / code).exists(), number
        assert status in ("ok", "imprecise", "wrong"), number
        assert (status == "ok") == (not english) == (not chinese), number


def test_every_experiment_covers_statements_and_is_in_the_guide() -> None:
    for page in NOTES:
        shown = set(re.findall(r"<!-- lab:([\w-]+) -->", (DOCS / page).read_text(encoding="utf-8")))
        assert shown == set(all_experiments()), page
    for experiment in all_experiments().values():
        assert experiment.checklist, experiment.name
        assert all(1 <= number <= 150 for number in experiment.checklist), experiment.name


def test_generated_pages_are_up_to_date() -> None:
    for path, text in pages(all_experiments(), *committed()).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m tools.guide"


def test_committed_results_belong_to_the_present_predictions() -> None:
    for records, size in zip(committed(), ("full", "quick"), strict=True):
        for name, record in records.items():
            assert record["prediction_hash"] == all_experiments()[name].hash(), name
            assert record["predicted_at"] <= record["date"], name
            assert record["scale"] == size, name
            assert record["command"].startswith(f"clearhead lab run {name} --{size}"), name
            assert record["hardware"], name
            assert record["seeds"] >= 5, name
            for cell, metrics in record["results"].items():
                assert all(len(values) >= 5 for values in metrics.values()), (name, cell)


def test_every_experiment_has_a_committed_result() -> None:
    full, quick = committed()
    assert set(all_experiments()) == set(full) | set(quick)


def test_code_links_of_the_guide_exist() -> None:
    for page in NOTES:
        for link in re.findall(r"\]\((\.\./[^)#]+)", (DOCS / page).read_text(encoding="utf-8")):
            assert (DOCS / link).resolve().exists(), (page, link)


def test_both_languages_have_the_same_sections() -> None:
    pattern = re.compile(r'<a id="([\w-]+)">|<!-- lab:([\w-]+)')
    english, chinese = (pattern.findall((DOCS / page).read_text(encoding="utf-8")) for page in NOTES)
    assert english == chinese
