"""Every snippet in README and the guides runs, and the English and Chinese pages hold the same code and figures."""

import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

ROOT = Path(__file__).parents[1]
NAMES = (
    "README",
    "CONTRIBUTING",
    *(
        f"docs/{page}"
        for page in (
            "guide",
            "data",
            "train",
            "formats",
            "understand",
            "inference",
            "serve",
            "results",
            "explore",
            "one-token",
            "lab",
        )
    ),
)
PAIRS = [(f"{name}.md", f"{name}.zh-CN.md") for name in NAMES]
RUN = [
    f"{name}{language}.md"
    for name in ("README", "docs/guide", "docs/data", "docs/inference", "docs/explore", "docs/one-token", "docs/lab")
    for language in ("", ".zh-CN")
]


def blocks(name: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), flags=re.M | re.S)


@pytest.mark.parametrize("name", RUN)
def test_python_snippets_run(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path))
    snippets = blocks(name, "python")
    assert snippets
    for snippet in snippets:
        done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_console_snippets_print_the_shown_output() -> None:
    """Run each line after `$ `; the lines below it, if any, are its output."""
    for block in blocks("README.md", "console"):
        for command, expected in re.findall(r"^\$ clearhead (.*)\n((?:(?!\$ ).*\n)*)", block, flags=re.M):
            done = subprocess.run(
                [sys.executable, "-m", "clearhead", *shlex.split(command)], capture_output=True, text=True, check=False
            )
            assert "Traceback" not in done.stderr
            if expected:
                assert (done.stdout + done.stderr).strip() == expected.strip()
            else:
                assert done.returncode == 0, done.stderr


def code_of(name: str) -> list[str]:
    """Return what must be equal in both languages: code without comments, and the figures in tables."""
    text = (ROOT / name).read_text(encoding="utf-8")
    code = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S)
    lines = [re.sub(r"\s*#.*", "", line) for block in code for line in block.splitlines()]
    layout = r"^  \w+/ |^(tests|bench|docs|deploy|examples)/"
    lines = [line for line in lines if not re.search(layout, line)]
    return lines + re.findall(r"\d+(?:[.,]\d+)*x?", " ".join(re.findall(r"^\|.*\|$", text, flags=re.M)))


@pytest.mark.parametrize(("english", "chinese"), PAIRS)
def test_both_languages_hold_the_same_code_and_figures(english: str, chinese: str) -> None:
    ours, theirs = code_of(english), code_of(chinese)
    assert ours
    assert ours == theirs
    headings = [
        re.findall(r"^#+ ", (ROOT / name).read_text(encoding="utf-8"), flags=re.M) for name in (english, chinese)
    ]
    assert headings[0] == headings[1]


def numbers_of(name: str) -> list[str]:
    """Return the numbers of a page, but for those in names (GPT-2), sorted: word order differs between languages."""
    text = (ROOT / name).read_text(encoding="utf-8")
    units = {"million": 1_000_000, "万": 10_000}
    text = re.sub(r"(\d+) (million|万)", lambda match: str(int(match[1]) * units[match[2]]), text)
    return sorted(re.findall(r"(?<![A-Za-z\d])(?<![A-Za-z]-)[+−]?\d+(?:[.,-]\d+)*", text))


@pytest.mark.parametrize(("english", "chinese"), PAIRS)
def test_both_languages_hold_the_same_numbers(english: str, chinese: str) -> None:
    """In the text as well as in tables and code."""
    assert numbers_of(english) == numbers_of(chinese)


@pytest.mark.parametrize(("english", "chinese"), PAIRS)
def test_each_language_links_to_the_other_and_stays_in_its_own(english: str, chinese: str) -> None:
    assert f"[中文]({Path(chinese).name})" in (ROOT / english).read_text(encoding="utf-8")
    text = (ROOT / chinese).read_text(encoding="utf-8")
    assert f"[English]({Path(english).name})" in text
    links = re.findall(r"\[(?!English\])[^]]*\]\(([^)]+)\.md\)", text)
    assert [link for link in links if ((ROOT / chinese).parent / f"{link}.zh-CN.md").exists()] == []


@pytest.mark.parametrize("name", [chinese for _, chinese in PAIRS])
def test_chinese_is_spaced_from_latin_and_has_full_width_punctuation(name: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.M | re.S)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)|\*\*", r"\1", text)  # links read as their text
    chinese = r"[\u4e00-\u9fff]"
    assert re.findall(rf".*{chinese}[A-Za-z0-9`(,;:!?.].*|.*[A-Za-z0-9`)%,;:!?.]{chinese}.*", text) == []


def test_every_backend_and_every_model_file_is_in_the_guide() -> None:
    from clearhead.ops.attention.dispatch import BACKENDS

    text = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    files = [path.name for path in (ROOT / "src/clearhead/model").glob("*.py") if path.name != "__init__.py"]
    assert [name for name in [*files, *BACKENDS] if f"`{name}`" not in text] == []


def test_every_data_file_format_and_task_is_in_its_guide() -> None:
    from clearhead.config.data import Format, Task

    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    files = [path.name for path in (ROOT / "src/clearhead/data").glob("*.py") if path.name != "__init__.py"]
    assert [name for name in [*files, *get_args(Format), *get_args(Task)] if f"`{name}`" not in text] == []


def test_every_setting_and_file_of_training_is_in_its_guide() -> None:
    from clearhead.config.train import TrainConfig

    text = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    files = [path.name for path in (ROOT / "src/clearhead/train").glob("*.py") if path.name != "__init__.py"]
    assert [name for name in [*files, *TrainConfig.model_fields] if f"`{name}`" not in text] == []


def test_every_format_file_is_in_the_guide() -> None:
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    files = [path.name for path in (ROOT / "src/clearhead/checkpoint/formats").glob("*.py")]
    assert [name for name in files if name != "__init__.py" and f"`{name}`" not in text] == []


def test_every_command_recipe_and_task_of_encoders_is_in_the_guide() -> None:
    from clearhead.cli import encoder_tasks
    from clearhead.config.recipe import load_recipe, recipe_names

    text = (ROOT / "docs" / "understand.md").read_text(encoding="utf-8")
    found = {name: each for name, each in vars(encoder_tasks).items() if inspect.isfunction(each)}
    verbs = [name for name, each in found.items() if each.__module__ == encoder_tasks.__name__]
    labeled = ("classification", "regression", "tagging", "answering", "similarity")
    recipes = [name for name in recipe_names() if load_recipe(name).data.task in labeled]
    wanted = [*[name for name in verbs if not name.startswith("_")], *recipes, *labeled]
    assert len(wanted) > 20
    assert [name for name in wanted if f"`{name}`" not in text] == []


def test_links_between_documents_resolve() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path}: {target}"


def test_the_api_reference_is_up_to_date() -> None:
    from tools.api_reference import TARGET, reference

    assert TARGET.read_text(encoding="utf-8") == reference(), "run `make docs`"
