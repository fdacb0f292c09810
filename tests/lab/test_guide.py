"""The guide is complete: every statement is mapped, every experiment is on a page, and no figure is typed by hand."""

import json
import re

import pytest

from clearhead.lab.registry import all_experiments
from tools.guide import DOCS, RESULTS, pages, statements

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
    records = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for path, text in pages(all_experiments(), records).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m tools.guide"


def test_committed_results_belong_to_the_present_predictions() -> None:
    if not RESULTS.exists():
        pytest.skip("no committed results")
    records = json.loads(RESULTS.read_text(encoding="utf-8"))
    for name, experiment in all_experiments().items():
        if name in records:
            assert records[name]["prediction_hash"] == experiment.hash(), name
            assert records[name]["predicted_at"] <= records[name]["date"], name


def test_code_links_of_the_guide_exist() -> None:
    for page in NOTES:
        for link in re.findall(r"\]\((\.\./[^)#]+)", (DOCS / page).read_text(encoding="utf-8")):
            assert (DOCS / link).resolve().exists(), (page, link)


def test_both_languages_have_the_same_sections() -> None:
    pattern = re.compile(r'<a id="([\w-]+)">|<!-- lab:([\w-]+)')
    english, chinese = (pattern.findall((DOCS / page).read_text(encoding="utf-8")) for page in NOTES)
    assert english == chinese
