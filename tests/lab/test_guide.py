"""The guide is complete: every statement is mapped, every experiment is on a page, and no figure is typed by hand."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clearhead.cli import app
from clearhead.config.recipe import load_recipe
from clearhead.lab.registry import all_experiments, committed_records
from tools.guide import DOCS, VIEWS, pages, statements

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
    for path, text in pages(all_experiments(), *committed_records()).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m tools.guide"


def test_committed_results_belong_to_the_present_predictions() -> None:
    for records, size in zip(committed_records(), ("full", "quick"), strict=True):
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
    full, quick = committed_records()
    assert set(all_experiments()) == set(full) | set(quick)


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def snippets(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page(name), re.M | re.S)


def prose(name: str) -> str:
    """Return what is written by hand, without code, formulas in code spans, exercises and link targets."""
    text = re.sub(r"<!-- (\w+):.*?<!-- /\1 -->|^```.*?^```", "", page(name), flags=re.M | re.S)
    text = re.sub(r"^(?:#|Exercise|练习).*|`[^`]*`|\]\([^)]*\)|<[^>]*>", "", text, flags=re.M)
    return re.sub(r"[A-Za-z]+-\d+|\b(?:19|20)\d\d\b", "", text)  # GPT-2 and years


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:[.,]\d+)*", text)


@pytest.fixture(scope="module")
def printed() -> list[tuple[str, str]]:
    """Run the snippets; return what each prints, and what its comments say that it prints."""
    results = []
    for snippet in snippets(NOTES[0]):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(snippet, "notes.md", "exec"), {})
        shown = re.findall(r"^ *print\(.*\)(?:  #|\n +#) (.*)$", snippet, re.M)
        results.append((" | ".join(output.getvalue().splitlines()), " | ".join(shown)))
    return results


def test_snippets_print_what_the_guide_shows(printed: list[tuple[str, str]]) -> None:
    assert len(printed) > 15
    for output, shown in printed:
        assert output == shown


def test_numbers_of_the_guide_are_printed_by_its_snippets(printed: list[tuple[str, str]]) -> None:
    known = {"0", "1", "150"}.union(*(numbers(output) for output, _ in printed))
    known |= {number for snippet in snippets(NOTES[0]) for number in numbers(snippet)}
    assert len(statements()) == 150
    for name in NOTES:
        assert set(numbers(prose(name))) <= known, name


def test_both_languages_have_the_same_snippets_numbers_and_links() -> None:
    english, chinese = NOTES
    assert snippets(english) == snippets(chinese)
    assert sorted(numbers(prose(english))) == sorted(numbers(prose(chinese)))
    links = [re.findall(r"\]\((\.\./[^)]+|images/[^)]+|lab/[^)]+)\)", page(name)) for name in NOTES]
    assert links[0] == links[1]
    commands = [sorted(re.findall(r"`([^`\n]*clearhead [^`\n]+)`", page(name))) for name in NOTES]
    assert commands[0] == commands[1]


def test_links_to_code_lead_to_the_definition() -> None:
    count = 0
    for name in NOTES:
        for symbol, link, line in re.findall(r"\[`([\w.]+)`\]\((\.\./[^)#]+)#L(\d+)\)", page(name)):
            text = (DOCS / link).read_text(encoding="utf-8").splitlines()[int(line) - 1]
            assert re.match(rf" *(?:class|def) {symbol.rpartition('.')[2]}\b", text), (name, symbol, text)
            count += 1
        for link in re.findall(r"\]\((\.\./[^)#]+)", page(name)):
            assert (DOCS / link).resolve().exists(), (name, link)
    assert count > 80


def test_every_topic_has_code_an_experiment_or_a_view_and_an_exercise() -> None:
    for name, exercise in zip(NOTES, ("Exercise: ", "练习："), strict=True):
        topics = re.split(r'^<a id="([\w-]+)"></a>$', page(name), flags=re.M)[1:]
        assert {row[1] for row in statements()} <= set(topics[::2])
        for topic, text in zip(topics[::2], topics[1::2], strict=True):
            assert "../src/clearhead/" in text, topic
            assert text.count(exercise) == 1, topic
            assert f"<!-- corrections:{topic} -->" in text, topic


def test_every_statement_has_a_view_or_an_experiment() -> None:
    covered = {number for experiment in all_experiments().values() for number in experiment.checklist}
    viewed = {topic for _, topics in VIEWS.values() for topic in topics.split()}
    assert [row[0] for row in statements() if int(row[0]) not in covered and row[1] not in viewed] == []


def test_the_views_exist() -> None:
    for page_name, column in (("explore.md", 0), ("explore.zh-CN.md", 1)):
        names = [(name, chinese)[column] for name, (chinese, _) in VIEWS.items()]
        assert [name for name in names if f"| {name} |" not in page(page_name)] == []


def test_both_languages_have_the_same_sections() -> None:
    pattern = re.compile(r'<a id="([\w-]+)">|<!-- lab:([\w-]+)')
    english, chinese = (pattern.findall(page(name)) for name in NOTES)
    assert english == chinese


def test_chinese_is_spaced_from_latin_and_has_full_width_punctuation() -> None:
    text = re.sub(r"^```.*?^```|<!-- lab:.*?<!-- /lab -->", "", page(NOTES[1]), flags=re.M | re.S)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)|\*\*", r"\1", text)  # links read as their text
    chinese = "[\u4e00-\u9fff]"
    assert re.findall(rf".*{chinese}[A-Za-z0-9`(,;:!?.].*|.*[A-Za-z0-9`)%,;:!?.]{chinese}.*", text) == []


def test_the_same_seeds_gave_the_same_numbers_in_every_experiment() -> None:
    """The baseline of these experiments is one and the same; each run trained it anew."""
    full, quick = committed_records()
    baselines = (
        (full, ("heads", "heads|4"), ("feed-forward", "with feed-forward"), ("mask-order", "before"),
         ("look-ahead", "causal mask|in training"), ("projections", "Q, K, V"), ("norm-axis", "per token|whole rows")),
        (quick, ("padding", "mask|as trained"), ("batch-norm-text", "LayerNorm|32"), ("label-smoothing", "ε|0"),
         ("embedding-scale", "×√d, tie all")),
    )  # fmt: skip
    for records, *cells in baselines:
        losses = [records[name]["results"][cell]["loss"] for name, cell in cells]
        assert all(each == losses[0] for each in losses)


def test_commands_of_the_guide_run(tmp_path: Path) -> None:
    text = tmp_path / "FILE"
    text.write_text("The old man opened the door.\n", encoding="utf-8")
    ran = 0
    for command in sorted(set(re.findall(r'`((?:echo "[^"]*" \| )?clearhead [^`]+)`', page(NOTES[0])))):
        said, _, words = command.rpartition("clearhead ")
        arguments = [str(text) if word == "FILE" else word for word in shlex.split(words)]
        if arguments[0] in ("explore", "lab"):  # a page, and minutes
            assert arguments[0] == "explore" or arguments[2] in all_experiments()
            continue
        if arguments[0] == "train":  # the settings, not the training
            values = [setting.split(",")[0] for setting in arguments[2:]]
            assert load_recipe(arguments[1], values)
            continue
        arguments += ["--max-new-tokens", "4"] if arguments[0] == "generate" else []
        result = CliRunner().invoke(app, arguments, input=said[6:-4] or None)
        assert result.exit_code == 0, (command, result.output, result.exception)
        ran += 1
    assert ran >= 6
