"""`clearhead demo`: it ends with commands that work as pasted, and its picture shows every character."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from clearhead.cli import app, demo
from clearhead.cli.demo import _clarity, _free_folder, _row, _whole_sentences, show_alignment
from clearhead.predict import Alignment, load
from tests.cli.models import make
from tools.terminal_svg import CELL, render

CROSSED = Alignment(("he", "did", "sing"), ("er", "sang"), ((0, 0), (2, 1)), ((0.9, 0.1, 0.0), (0.1, 0.3, 0.6)))


def test_the_demo_ends_with_three_commands_that_work_as_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "HELD_OUT": 4,
        "STORY_SAMPLES": 2,
        "STORY_OPTIONS": {"max_new_tokens": 4, "temperature": 1.0},
    }.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "OVERRIDES", (*demo.OVERRIDES, "data.train.count=500", "train.eval_samples=2"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}

    def shell(command: str) -> str:
        done = subprocess.run(command, shell=True, capture_output=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    result = CliRunner().invoke(app, ["demo", "--steps", "4"])
    assert result.exit_code == 0, result.output
    for text in ("A translator from scratch", "Held-out sentences", "alignment error rate", "火车站", "A story"):
        assert text in result.stdout
    translate, fill, train = re.findall(r"^  \$ (.*)$", result.stdout, flags=re.M)
    _, links, words = shell(translate).rstrip("\n").split("\t")
    assert len(links.split()) == len(words.split())
    assert shell(fill).startswith("door")
    quick = "train.steps=1 train.eval_samples=0 train.metric=loss data.train.count=300 data.valid.count=10"
    shell(train.replace("train.steps=800", quick))
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"demo", "en-zh"}


def test_a_folder_in_use_is_not_touched(tmp_path: Path) -> None:
    assert _free_folder(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert _free_folder(tmp_path / "demo") == tmp_path / "demo-3"


def test_an_alignment_is_drawn_with_words_on_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load(make(tmp_path / "model", "tiny-translator"), "cpu")
    show_alignment(Console(width=80), model, CROSSED)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in lines[-3:]] == ["        he  did  sing", "    er  ██", "  sang      ░░░  ████"]
    assert _row(("ab", "c"), (0.5, 0.5), 1, " .:*#")[0][0] == "::", "ASCII where a terminal has no blocks"


def test_the_clearest_alignment_changes_the_word_order_and_has_no_doubtful_link() -> None:
    crossing = Alignment(("a", "b"), ("B", "A"), ((1, 0), (0, 1)), ((0.2, 0.8), (0.7, 0.3)))
    doubtful = Alignment(("a", "b"), ("B", "A"), ((1, 0), (0, 1)), ((0.2, 0.8), (0.5, 0.4)))
    assert max([doubtful, CROSSED, crossing], key=_clarity) == crossing


def test_a_story_ends_with_a_whole_sentence() -> None:
    assert _whole_sentences('He  came.\n"Who?" said') == 'He came. "Who?"'
    assert _whole_sentences("no end") == "no end"


def test_the_picture_keeps_colors_widths_and_leading_spaces() -> None:
    svg = render("\n  \x1b[32mgrün\x1b[0m 火车站 " + "x" * 120 + "\n", "a title", 100)
    root = ElementTree.fromstring(svg)
    texts = [element for element in root.iter() if element.tag.endswith("text") and "textLength" in element.attrib]
    shown = "".join(element.text or "" for element in texts).replace("\xa0", " ")
    assert "x" * 120 in shown.replace("\n", "").replace(" ", ""), "wrapped, not clipped"
    assert float(texts[0].attrib["x"]) == pytest.approx(2 * CELL), "leading spaces"
    chinese = next(element for element in texts if "火车站" in (element.text or ""))
    cells = sum(2 if ord(character) > 0x2E80 else 1 for character in chinese.text or "")
    assert float(chinese.attrib["textLength"]) == pytest.approx(CELL * cells)
    assert "rgb(87,211,100)" in svg.replace(" ", "") or "#57d364" in svg
    assert "Noto Sans CJK SC" in svg
    assert 'xml:space="preserve"' in svg
