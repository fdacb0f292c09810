"""Messages are Chinese by CLEARHEAD_LANG or the locale, and complete; English and data stay as they are."""

import ast
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.cli.catalog import Catalog, load_catalog, parse, read_po
from clearhead.cli.language import LOCALE_VARIABLES, language
from tools.messages import LOCALE, Messages, problems, render, source_messages

RECIPE = """
model: {preset: tiny-encoder, dim: 32, heads: 2, ff_dim: 32, encoder_layers: 1}
tokenizer: {kind: char}
data: {task: classification, train: {format: csv, files: [TABLE]}, held_out: 0.2, max_length: 32}
train: {steps: 20}
"""


DRIVER = """
import contextlib, io, json, sys
from clearhead.cli import main
results = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, out, err, code = ["clearhead", *arguments], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    results.append((code, out.getvalue(), err.getvalue()))
sys.__stdout__.write(json.dumps(results))
"""


def run(*commands: list[str], **environment: str) -> list[tuple[int, str, str]]:
    """Run commands in one process; return exit code, stdout and stderr of each."""
    settings = os.environ | {"CLEARHEAD_LANG": "zh", "PYTHONIOENCODING": "utf-8"} | environment
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(commands)], env=settings, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("path", sorted(LOCALE.glob("*.po")), ids=lambda path: path.stem)
def test_catalogs_are_complete_and_in_the_order_of_the_sources(path: Path) -> None:
    """After a change of a message: python -m tools.messages --update, then translate what is empty."""
    assert problems(path.stem) == []
    text = path.read_text(encoding="utf-8")
    assert render(source_messages(), read_po(text), path.stem) == text


def test_every_message_is_found_by_its_own_template() -> None:
    messages = read_po((LOCALE / "zh.po").read_text(encoding="utf-8"))
    catalog = Catalog(messages)
    for msgid, msgstr in messages.items():
        literals, names = parse(msgid)
        adjacent = {name for literal, name in zip(literals[1:-1], names[1:], strict=True) if not literal}
        values = {name: "" if name in adjacent else str(100 + number) for number, name in enumerate(names)}
        assert catalog.translate(msgid.format(**values)) == msgstr.format(**values)


def test_templates_of_every_form_of_message_are_extracted() -> None:
    code = '''
"""Docstrings are no messages."""
raise UserError(f"{path.name}: {len(rows):,} rows" + (" are missing" if rows else f", {rows!r} too many"))
log("two parts " f"of {one} text")
warnings.warning("%s: not usable", folder)
re.compile("[a-z] not a message")
x: "dict[str, list[int]]" = {"key": "single"}
'''
    visitor = Messages()
    visitor.visit(ast.parse(code))
    assert list(visitor.found) == [
        "{name}: {rows} rows{value}", "are missing", "{rows} too many",
        "two parts of {one} text", "{folder}: not usable",
    ]  # fmt: skip


def test_messages_inside_messages_are_translated_and_values_are_not() -> None:
    translate = load_catalog("zh").translate
    assert (
        translate("a.yaml: heads: unknown setting; did you mean dim?")
        == "a.yaml：heads：未知的配置项；是不是想写 dim？"
    )
    assert translate("standard input, line 3: empty; give some text") == "标准输入，第 3 行：为空；请给出文本"
    assert translate("b.csv, line 1: no column 'txet'; known: text; without a header, give columns by number") == (
        "b.csv，第 1 行：没有 'txet' 列；已知：text；没有表头时，请用列号指定各列"
    )
    assert translate("/x/is missing/y does not exist; check the path") == "/x/is missing/y 不存在；请检查路径"
    assert translate("--kind: 'a string' is not allowed; did you mean char?").startswith("--kind：不支持 'a string'；")
    assert translate("a sentence that nobody has translated: 1, 2") == "a sentence that nobody has translated: 1, 2"


@given(st.lists(st.sampled_from([" is missing", ": ", "; ", ", line ", " and ", "'", '"', "x", "7", "{", "\n", "。"])))
def test_any_text_is_translated_quickly_and_keeps_its_numbers(pieces: list[str]) -> None:
    text = "".join(pieces)
    start = time.perf_counter()
    translated = load_catalog("zh").translate(text)
    assert time.perf_counter() - start < 5
    assert translated.count("7") == text.count("7")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LC_MESSAGES": "zh_TW.UTF-8", "LANG": "de_DE.UTF-8"}, "zh"),
        ({"LC_ALL": "C.UTF-8", "LANG": "zh_CN.UTF-8"}, "en"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
        ({"CLEARHEAD_LANG": "en", "LC_ALL": "zh_CN.UTF-8"}, "en"),
        ({"CLEARHEAD_LANG": "zh", "LC_ALL": "C"}, "zh"),
    ],
)
def test_the_setting_comes_before_the_locale(
    settings: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CLEARHEAD_LANG", *LOCALE_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert language.__wrapped__() == expected


def test_help_errors_and_a_dry_run_are_chinese(tmp_path: Path) -> None:
    table, damaged = tmp_path / "rows.csv", tmp_path / "damaged.csv"
    table.write_text("text,label\n" + "".join(f"sentence {number},l{number % 2}\n" for number in range(40)))
    damaged.write_bytes(b"text,label\nfirst,a\n\xff,b\n")
    for each in (table, damaged):
        each.with_suffix(".yaml").write_text(RECIPE.replace("TABLE", str(each)))
    errors = {
        "presets tiny-gpt haeds=8": "tiny-gpt：haeds：未知的配置项；是不是想写 heads？",
        "presets --jsn": "没有选项 --jsn（可能的选项：--json）。用法见 clearhead presets --help",
        "trian": "没有名为 'trian' 的命令。是不是想写 'train'？用法见 clearhead --help",
        "info en-dee": (
            "没有名为 'en-dee' 的模型：既不是目录，也不是 `clearhead models` 列出的名称；是不是想写 en-de？"
        ),
        "new nothing.csv": (
            "nothing.csv 不存在；请检查路径，或放到 data/nothing.csv，或用 CLEARHEAD_DATA 指定含有 nothing.csv 的目录"
        ),
        f"train {damaged.with_suffix('.yaml')} --dry-run": (
            f"{damaged}，第 3 行：不是有效的 UTF-8；请把文件保存为 UTF-8"
        ),
    }
    others = [["tokenizer", "encode", "--help"], [], ["train", str(table.with_suffix(".yaml")), "--dry-run"]]
    results = run(*others, *map(str.split, errors), CLEARHEAD_CACHE=str(tmp_path))
    encode, commands, dry, *failed = results
    for text in (
        "用法：",
        "把标准输入的每一行编码成",
        "示例：echo",
        "参数",
        "[必填]",
        "显示这份帮助并退出。",
    ):
        assert text in encode[1]
    assert "╭─ 训练 ─" in commands[1]
    assert dry[0] == 0, dry[2]
    assert f"正在对 {table} 分词 ……" in dry[2]
    assert re.search(r"\n# 验证          损失 \d\.\d+，用时 \d\.\d 秒\n", dry[1])
    assert re.search(r"\n# 时间          20 步约需 \d+ 秒，不含验证\n", dry[1])
    for (code, _, message), expected in zip(failed, errors.values(), strict=True):
        assert (code, message.splitlines()[-1]) == (2, f"clearhead: {expected}")


def test_data_is_the_same_in_both_languages() -> None:
    commands = [["presets", "gpt2", "--json"], ["recipes"]]
    assert run(*commands) == run(*commands, CLEARHEAD_LANG="en")


def test_english_loads_no_catalog_and_a_terminal_without_chinese_gets_english() -> None:
    code = """if True:
        import sys, clearhead.cli as cli
        sys.argv = ["clearhead", "presets", "tiny-gpt", "haeds=8"]
        try: cli.main()
        finally: print("clearhead.cli.catalog" in sys.modules, "clearhead.cli.localize" in sys.modules)
    """
    english = "clearhead: tiny-gpt: haeds: unknown setting; did you mean heads?\n"
    for settings in ({"CLEARHEAD_LANG": "en"}, {"CLEARHEAD_LANG": "zh", "PYTHONIOENCODING": "ascii"}):
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True, check=False
        )
        assert (done.stdout, done.stderr) == ("False False\n", english)
