"""The HTML report: true to the log, safe with any text, complete for any log, fast for a long one."""

import json
import math
import re
import time
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import UserError
from clearhead.train.report import report, write_report

EVIL = "<script>alert('1')</script> \"quoted\" & 'so' {style}"
KEYS = """accuracy attention bleu confusion counts epoch exposure grad_norm labels left_out loss lr metric mfu
mistakes next_sentence_accuracy output parameters perplexity reason recipe reference samples seconds
signature source steps target teacher_forced text tokens_per_second truncated weights"""
names = st.sampled_from(KEYS.split())
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just(10**400) | st.just(5e-324),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=8,
)
kinds = st.sampled_from(["start", "step", "validation", "note", "end", "other"])
lines_of_any_kind = st.lists(
    st.builds(
        lambda line, kind, step: {**line, "kind": kind, "step": step},
        st.dictionaries(names, values),
        kinds,
        st.integers(-5, 10**6) | st.just(10**400),
    ),
    max_size=6,
)


class Page(HTMLParser):
    """The elements of a page with their attributes, and the text of each kind of element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.inside[-1] if self.inside else "", []).append(data)

    @property
    def everything(self) -> str:
        return " ".join(text for texts in self.texts.values() for text in texts)


def report_of(run: Path, lines: list[dict[str, Any]]) -> str:
    run.mkdir(exist_ok=True)
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return report(run)


def a_run(steps: int = 40) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [{"kind": "start", "recipe": "mini", "parameters": 6_315_008, "steps": 80}]
    for step in range(1, steps + 1):
        lines.append({"kind": "step", "step": step, "loss": 100 / step, "accuracy": 0.5, "lr": 1e-4, "grad_norm": 1.5})
        lines[-1] |= {"tokens_per_second": 12_345, "mfu": 0.41, "epoch": step / 10, "seconds": step * 100.0}
        if step % 10 == 0:
            sample = {
                "source": "A dog.",
                "reference": "Ein Hund.",
                "output": "Ein Hund." if step > 20 else f"Hund {step}",
            }
            lines.append({"kind": "validation", "step": step, "loss": abs(step - 30) + 1.25, "perplexity": 3.5})
            lines[-1] |= {"bleu": step / 2, "chrf": step * 1.0, "signature": {"bleu": "tok:13a"}, "samples": [sample]}
    return lines


def test_headline_numbers_are_those_of_the_log(tmp_path: Path) -> None:
    page = Page(report_of(tmp_path / "my run", [*a_run(), {"kind": "end"}]))
    assert page.texts["h1"] == ["my run"]
    assert "recipe mini · 6.315M parameters · finished" in page.texts["p"]
    text = page.everything
    for fact in ("at step 30", "perplexity 3.5", "of 80", "epoch 4", "41% MFU"):
        assert fact in text
    assert page.texts["b"][:6] == ["1.25", "20", "40", "40", "12,345", "1 h 7 min"]
    assert "chose the best model" in text
    assert ("div", {"class": "tile", "title": "tok:13a"}) in page.elements, "a metric shows its signature"
    assert "not finished" in report_of(tmp_path, a_run())
    assert "loss has not improved" in report_of(
        tmp_path, [*a_run(), {"kind": "end", "reason": "loss has not improved for 3 validations"}]
    )


def test_every_number_has_a_chart_and_every_point_a_title(tmp_path: Path) -> None:
    lines = a_run()
    for line in lines:
        if line["kind"] == "validation":
            line["next_sentence_accuracy"] = 0.25
    page = Page(report_of(tmp_path, lines))
    charts = [attributes["aria-label"] for tag, attributes in page.elements if tag == "svg"]
    assert charts == [
        "Loss",
        "Accuracy",
        "BLEU and chrF",
        "Learning rate",
        "Gradient norm",
        "Speed",
        "Next sentence accuracy",
    ]
    titles = page.texts["title"][1:]  # the first is that of the page
    assert len(titles) == 40 * 5 + 4 * 4
    for title in ("training, step 8: 12.5", "validation, step 30: 1.25", "chrF, step 10: 10"):
        assert title in titles
    assert titles[-1] == "validation, step 40: 25.0%"


def test_curves_follow_the_numbers(tmp_path: Path) -> None:
    page = Page(report_of(tmp_path, [{"kind": "step", "step": step, "lr": step} for step in (0, 5, 10)]))
    points = [(float(a["cx"] or 0), float(a["cy"] or 0)) for tag, a in page.elements if tag == "circle"]
    left, middle, right = points
    assert left[0] < middle[0] < right[0]
    assert left[1] > middle[1] > right[1], "larger values are higher"
    assert middle == pytest.approx([(a + b) / 2 for a, b in zip(left, right, strict=True)], abs=0.1)
    labels = [text for text in page.texts["text"] if text != "step"]
    assert labels == ["0", "2", "4", "6", "8", "10"] * 2


def test_a_constant_is_a_line_in_the_middle(tmp_path: Path) -> None:
    page = Page(report_of(tmp_path, [{"kind": "step", "step": step, "lr": 3e-4} for step in (1, 2)]))
    heights = {float(a["cy"] or 0) for tag, a in page.elements if tag == "circle"}
    assert heights == {(12 + 240 - 28) / 2}


def test_values_over_decades_have_a_logarithmic_axis(tmp_path: Path) -> None:
    page = Page(report_of(tmp_path, [{"kind": "step", "step": 1 + n, "grad_norm": 10.0**n} for n in range(-2, 3)]))
    heights = [float(a["cy"] or 0) for tag, a in page.elements if tag == "circle"]
    gaps = [a - b for a, b in pairwise(heights)]
    assert gaps == pytest.approx([gaps[0]] * 4, abs=0.2)
    assert {"0.01", "0.1", "1", "10", "100"} <= {*page.texts["text"]}
    assert "before clipping, logarithmic" in page.texts["span"]


def test_a_missing_number_is_a_gap(tmp_path: Path) -> None:
    losses = [3, 2, math.nan, 2, None, 1]
    page = Page(report_of(tmp_path, [{"kind": "step", "step": n, "loss": loss} for n, loss in enumerate(losses)]))
    assert [a["class"] for tag, a in page.elements if tag == "path"].count("line") == 3
    assert sum(tag == "circle" for tag, _ in page.elements) == 4


def test_samples_show_outputs_over_the_validations(tmp_path: Path) -> None:
    page = Page(report_of(tmp_path, a_run()))
    rows = [text for kind in ("th", "td") for text in page.texts[kind]]
    assert rows[:5] == ["Source", "Reference", "Step 10", "Step 30", "Step 40"]
    assert [text for text in rows if "Hund" in text] == ["Ein Hund.", "Hund 10", "Ein Hund.", "Ein Hund."]
    assert sum(attributes.get("class") == "correct" for _, attributes in page.elements) == 2


def test_text_from_the_data_is_escaped(tmp_path: Path) -> None:
    lines = [{"kind": "start", "recipe": EVIL, EVIL: EVIL}, {"kind": "note", "step": 1, "text": EVIL}]
    lines.append({"kind": "validation", "step": 1, "bleu": 1, "signature": {"bleu": EVIL, EVIL: EVIL}, EVIL: 3})
    lines[-1]["samples"] = [{"source": EVIL, "reference": EVIL, "output": EVIL}]
    lines[-1]["mistakes"] = [{"source": EVIL, "reference": EVIL, "output": EVIL, "mistake": EVIL}]
    lines[-1]["attention"] = {"source": [EVIL], "target": [EVIL], "weights": [[0.5]]}
    lines[0] |= {"truncated": EVIL, "left_out": EVIL, "metric": EVIL}
    lines[-1]["confusion"] = {"labels": [EVIL[:20], EVIL[20:]], "counts": [[1, 2], [3, 4]]}
    lines.append({"kind": "end", "reason": EVIL})
    run = tmp_path / "<b>run & co"
    run.mkdir()
    (run / "recipe.yaml").write_text(f"train: {EVIL}")
    text = report_of(run, lines)
    page = Page(text)
    assert {"script", "b>run"}.isdisjoint(tag for tag, _ in page.elements)
    assert "<script" not in text
    assert page.texts["h1"] == ["<b>run & co"]
    assert EVIL in page.texts["td"]
    assert page.texts["pre"] == [f"train: {EVIL}"]
    known = {"class", "style", "title", "x", "y", "d", "cx", "cy", "r", "dir", "role", "aria-label", "viewbox", "lang"}
    known |= {"text-anchor", "transform", "width", "height", "rx", "charset", "name", "content", "http-equiv"}
    assert {name for _, attributes in page.elements for name in attributes} <= known, "no text escapes its attribute"


def test_a_lone_surrogate_is_replaced(tmp_path: Path) -> None:
    report_of(tmp_path, [{"kind": "note", "step": 1, "text": "a \udc80 b"}])
    assert "a ? b" in write_report(tmp_path).read_text(encoding="utf-8")


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    text = report_of(tmp_path, a_run())
    assert not re.search(r"\s(src|href|on\w+)=|url\(|@import|//|<(script|link|img|iframe)", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text


def test_a_confusion_matrix_has_labels_down_and_predictions_across(tmp_path: Path) -> None:
    earlier, last = [[0, 4], [5, 5]], [[3, 1], [0, 1_000]]
    lines = [
        {"kind": "validation", "step": step, "confusion": {"labels": ["cat", "dog"], "counts": counts}}
        for step, counts in enumerate((earlier, last))
    ]
    page = Page(report_of(tmp_path, lines))
    cells = [attributes["title"] for tag, attributes in page.elements if tag == "td"]
    assert cells == ["cat predicted as cat: 3 (75.0%)", "cat predicted as dog: 1 (25.0%)",
                     "dog predicted as cat: 0 (0.0%)", "dog predicted as dog: 1,000 (100.0%)"]  # fmt: skip
    assert page.texts["td"] == ["3", "1", "0", "1,000"]


def test_a_large_confusion_matrix_is_truncated_with_a_note(tmp_path: Path) -> None:
    matrix = {"labels": list(range(100)), "counts": [[1] * 100] * 100}
    text = report_of(tmp_path, [{"kind": "validation", "step": 1, "confusion": matrix}])
    assert "The first 80 of 100 labels." in text
    assert text.count("<td") == 80 * 80


def test_exposure_bias_is_drawn_by_position(tmp_path: Path) -> None:
    line = {"kind": "validation", "step": 5, "exposure": {"teacher_forced": [0.9, 0.8], "free_running": [0.9, None]}}
    titles = Page(report_of(tmp_path, [line])).texts["title"][1:]
    forced = ["teacher forcing, position 1: 90.0%", "teacher forcing, position 2: 80.0%"]
    assert titles == [*forced, "free-running, position 1: 90.0%"]


def test_the_metric_that_chose_the_model_comes_first(tmp_path: Path) -> None:
    lines = a_run()
    lines[0]["metric"] = "chrf"
    page = Page(report_of(tmp_path, lines))
    tile = page.texts["span"].index("Best chrF")
    assert page.texts["span"][tile : tile + 3] == ["Best chrF", "at step 40", "chose the best model"]
    assert page.texts["b"][0] == "40"
    charts = [attributes["aria-label"] for tag, attributes in page.elements if tag == "svg"]
    assert charts[:2] == ["BLEU and chrF", "Loss"]


def test_the_axis_of_a_fraction_ends_at_100_percent(tmp_path: Path) -> None:
    page = Page(report_of(tmp_path, [{"kind": "step", "step": n, "accuracy": 0.1 * n} for n in range(1, 8)]))
    labels = {text for text in page.texts["text"] if text.endswith("%")}
    assert labels == {"0%", "20%", "40%", "60%", "80%", "100%"}


def test_one_validation_is_a_row_and_not_a_chart_of_one_dot(tmp_path: Path) -> None:
    page = Page(report_of(tmp_path, [{"kind": "validation", "step": 5, "loss": 2.5, "accuracy": 0.25}]))
    assert "circle" not in [tag for tag, _ in page.elements]
    assert page.texts["td"] == ["2.5 at step 5", "25.0% at step 5"]


def test_the_worst_mistakes_of_the_last_validation_are_listed(tmp_path: Path) -> None:
    mistakes = [{"source": "A cat.", "reference": "Eine Katze.", "output": "Hund.", "mistake": "chrF 3.0"}]
    lines = [{"kind": "validation", "step": n, "mistakes": mistakes if n == 2 else []} for n in (1, 2)]
    page = Page(report_of(tmp_path, lines))
    assert "Worst mistakes" in page.texts["h2"]
    assert page.texts["td"] == ["A cat.", "Eine Katze.", "Hund.", "chrF 3.0"]


def test_attention_is_a_map_of_weights(tmp_path: Path) -> None:
    drawn = {"source": ["A", "dog"], "target": ["Ein", "Hund"], "weights": [[0.75, 0.25], [0.1, 0.9]]}
    page = Page(report_of(tmp_path, [{"kind": "validation", "step": 1, "attention": drawn}]))
    cells = [attributes for tag, attributes in page.elements if tag == "rect"]
    assert [cell["style"] for cell in cells] == ["--share:83%", "--share:28%", "--share:11%", "--share:100%"]
    assert page.texts["title"][1:] == ["Ein ← A: 75%", "Ein ← dog: 25%", "Hund ← A: 10%", "Hund ← dog: 90%"]
    assert page.texts["text"] == ["A", "dog", "Ein", "Hund"]
    left, right = (float(cell["x"] or 0) for cell in cells[:2])
    assert left < right
    assert float(cells[0]["y"] or 0) < float(cells[2]["y"] or 0)


def test_truncated_and_left_out_rows_are_named_at_the_top(tmp_path: Path) -> None:
    facts = {"truncated": "3 of 9 training texts were truncated", "left_out": "left out: 2 empty"}
    page = Page(report_of(tmp_path, [{"kind": "start", **facts}]))
    assert page.texts["p"][-2:] == list(facts.values())


@pytest.mark.parametrize("line", [None, {"kind": "start"}, {"kind": "step", "step": 1, "loss": 3.0}, {"kind": "end"}])
def test_a_log_of_one_line_or_none_gives_a_page(tmp_path: Path, line: dict[str, Any] | None) -> None:
    assert "</html>" in report_of(tmp_path, [line] if line else [])


@given(lines_of_any_kind)
def test_any_log_gives_a_page(lines: list[dict[str, Any]]) -> None:
    with TemporaryDirectory() as folder:
        page = Page(report_of(Path(folder), lines))
    drawn = [a[name] or "" for _, a in page.elements for name in ("d", "x", "y", "cx", "cy") if name in a]
    assert not re.search("nan|inf|e", " ".join(drawn))
    assert page.texts["h1"] == [Path(folder).name], "the heading is not swallowed by other markup"


@given(st.lists(st.floats(), min_size=1, max_size=600))
def test_any_numbers_can_be_drawn(losses: list[float]) -> None:
    lines = [{"kind": "step", "step": n, "loss": loss, "lr": loss} for n, loss in enumerate(losses)]
    with TemporaryDirectory() as folder:
        text = report_of(Path(folder), lines)
    assert all(0 <= float(height) <= 240 for height in re.findall(r'cy="([^"]*)"', text))


def test_a_hundred_thousand_lines_take_seconds(tmp_path: Path) -> None:
    report_of(tmp_path, a_run(90_000))
    start = time.process_time()
    text = report(tmp_path)
    assert time.process_time() - start < 10  # far below a quadratic pass
    assert len(text) < 1_000_000
    assert "training, steps 1 to 375: mean" in text
    assert ", min 0.2667, max 100" in text, "downsampling keeps minimum and maximum"


def test_the_report_is_written_next_to_the_log(tmp_path: Path) -> None:
    report_of(tmp_path, a_run())
    (tmp_path / "recipe.yaml").write_text("train:\n  steps: 80\n")
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    assert path.read_text(encoding="utf-8") == report(tmp_path)
    assert "steps: 80" in path.read_text(encoding="utf-8")
    with pytest.raises(UserError, match="give a run folder"):
        report(tmp_path / "nowhere")
