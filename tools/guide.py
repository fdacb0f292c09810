"""Fill the pages of the guide from the lab's results: `python -m tools.guide`, with --check only compare.

lab/results/full.json   (in the package) the records in full size, copied from results folders with --results DIR …
lab/results/quick.json  those in quick size, which stand in where there is no other
docs/lab/report.html    the report
docs/notes*.md          the blocks between <!-- lab:NAME --> and <!-- /lab -->, those between
                        <!-- corrections:TOPIC --> and <!-- /corrections -->, and the lines (#L52) of links to code
docs/checklist*.md      the table of 150 statements, from docs/lab/checklist.tsv
"""

import argparse
import ast
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from clearhead.lab.experiment import Experiment
from clearhead.lab.registry import all_experiments, committed_records
from clearhead.lab.report import report
from clearhead.lab.runner import load_results
from clearhead.lab.verdict import Verdict, judge
from clearhead.lab.wording import OUTCOMES, effect, means, samples, scale

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS.parent / "src" / "clearhead" / "lab" / "results"
BLOCK = re.compile(r"<!-- lab:([\w-]+) -->\n.*?<!-- /lab -->", re.S)
CORRECTIONS = re.compile(r"<!-- corrections:([\w-]+) -->\n.*?<!-- /corrections -->", re.S)
SYMBOL = re.compile(r"\[`([\w.]+)`\]\((\.\./src/[^)#]+\.py)(?:#L\d+)?\)")
VIEWS = {  # views of `clearhead explore` that show a topic
    "Tokens": ("Token", "data-flow words tokenizers positions embeddings"),
    "Attention": ("注意力", "attention masks heads cross-attention sparse why-attention context"),
    "Step by step": ("逐步计算", "attention scaling heads value-matrix residual norms pre-norm embeddings"),
    "Next token": ("下一个 token", "embeddings depth sampling kv-cache label-smoothing"),
    "Translate": ("翻译", "encoder-decoder cross-attention teacher-forcing"),
    "Switches": ("开关", "masks heads residual feed-forward norms positions"),
    "Understand": ("理解", "bert"),
    "Compare": ("对比", "modern pre-norm"),
}
STATUS = {"ok": ("", ""), "imprecise": ("imprecise", "不准确"), "wrong": ("wrong", "有误")}
TITLES = (
    ("# 150 statements", "[中文](checklist.zh-CN.md)", "| | topic | code | view | experiment | correction |"),
    ("# 150 条说法", "[English](checklist.md)", "| | 主题 | 代码 | 视图 | 实验 | 更正 |"),
)
INTRO = (
    "Five study notes about the Transformer make 150 statements, numbered in the order of the notes. Each has its topic"
    " in [the guide](notes.md), its code, the views of [`clearhead explore`](explore.md) that show it, and the"
    " experiments of the lab that test it. An empty last column: the notes are right.",
    "五份 Transformer 学习笔记共有 150 条说法，按笔记的顺序编号。"
    "每条对应[指南](notes.zh-CN.md)中的主题、代码、[`clearhead explore`](explore.zh-CN.md)"
    " 中能看到它的视图，以及检验它的实验。"
    "最后一列为空，表示笔记的说法无误。",
)


def statements() -> list[list[str]]:
    """Return the rows of the checklist: number, section, code, status, correction in English and Chinese."""
    lines = (DOCS / "lab" / "checklist.tsv").read_text(encoding="utf-8").splitlines()
    return [[*line.split("\t"), "", ""][:6] for line in lines]


def add_records(records: dict[str, dict[str, Any]]) -> None:
    """Add or replace committed records, one a line."""
    for size, old in zip(("full", "quick"), committed_records(), strict=True):
        new = old | {name: record for name, record in records.items() if record["scale"] == size}
        lines = [
            f"{json.dumps(name)}: {json.dumps(record, ensure_ascii=False, separators=(',', ':'))}"
            for name, record in sorted(new.items())
        ]
        (RESULTS / f"{size}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def pages(
    experiments: dict[str, Experiment], full: dict[str, dict[str, Any]], quick: dict[str, dict[str, Any]]
) -> dict[Path, str]:
    """Return the generated pages."""
    records = {name: record for name, record in {**quick, **full}.items() if name in experiments}
    finished = {name: (experiments[name], record["results"]) for name, record in records.items()}
    verdicts = judge(finished)
    others = judge(
        {name: (experiments[name], quick[name]["results"]) for name in records if name in full and name in quick}
    )
    result = {}
    for language, suffix in enumerate(("", ".zh-CN")):
        path = DOCS / f"notes{suffix}.md"

        def block(match: re.Match[str], language: int = language) -> str:
            name = match[1]
            second = (quick[name], others[name]) if name in others else None
            inner = _verdicts(experiments[name], verdicts.get(name), records.get(name), second, language)
            return f"<!-- lab:{name} -->\n{inner}<!-- /lab -->"

        text = BLOCK.sub(block, path.read_text(encoding="utf-8"))
        text = CORRECTIONS.sub(partial(_corrections, language=language), text)
        result[path] = SYMBOL.sub(lambda match: f"[`{match[1]}`]({match[2]}#L{line_of(match[2], match[1])})", text)
        result[DOCS / f"checklist{suffix}.md"] = _checklist(experiments, language)
    result[DOCS / "lab" / "report.html"] = report(experiments, full, quick)
    return result


def _verdicts(
    experiment: Experiment,
    verdicts: list[Verdict] | None,
    record: dict[str, Any] | None,
    second: tuple[dict[str, Any], list[Verdict]] | None,
    language: int,
) -> str:
    """The claim and its verdicts as a quotation."""
    lines = [f"> **{experiment.claim[language]}** `clearhead lab run {experiment.name}`"]
    if verdicts is None or record is None:
        lines.append(("> Not in the committed report yet.", "> 尚未写入已提交的报告。")[language])
    else:
        for prediction, verdict in zip(experiment.predictions, verdicts, strict=True):
            colon, bracket = ((": ", " ({})"), ("：", "（{}）"))[language]
            text = f"{prediction.text[language]}{colon}**{OUTCOMES[verdict.outcome][language]}**"
            numbers = f"{means(prediction, record['results'], language)}{colon}{effect(prediction, verdict)}"
            lines.append(f"> - {text}{bracket.format(numbers)}")
        facts = ((", ", "，")[language]).join(filter(None, [scale(record, language), samples(experiment, verdicts)]))
        figures = ("figures", "图")[language]
        lines.append(f">\n> {facts} · [{figures}](lab/report.html#{experiment.name})")
        if second:
            pairs = zip(experiment.predictions, second[1], strict=True)
            row = [f"{OUTCOMES[v.outcome][language]}{bracket.format(effect(p, v))}" for p, v in pairs]
            lines.append(f">\n> {scale(second[0], language)}{colon}{(', ', '、')[language].join(row)}")
        if experiment.note[language]:
            lines.append(f">\n> {experiment.note[language]}")
    return "\n".join([lines[0], ">", *lines[1:]]) + "\n"


def line_of(link: str, symbol: str) -> int:
    """Return the line where a file defines a function, a class or a method ("Layer._add")."""
    scope: ast.AST = ast.parse((DOCS / link).read_text(encoding="utf-8"))
    for name in symbol.split("."):
        found = [
            node
            for node in ast.iter_child_nodes(scope)
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
        ]
        if not found:
            sys.exit(f"{link}: no {symbol!r}; correct the link in the guide")
        scope = found[0]
    assert isinstance(scope, ast.ClassDef | ast.FunctionDef)
    return scope.lineno


def _corrections(match: re.Match[str], language: int) -> str:
    """What the notes get wrong or say imprecisely about a topic."""
    section = match[1]
    rows = [row for row in statements() if row[1] == section and row[3] != "ok"]
    lines = []
    if rows:
        lines.append(("**Corrections to the notes**, with their numbers:", "**对笔记的更正**（附编号）：")[language])
        lines.append("")
        bracket, colon = ((" ({})", ": "), ("（{}）", "："))[language]
        for number, _, _, status, *texts in rows:
            word = bracket.format(STATUS[status][language])
            lines.append(f"- {number}{word}{colon}{texts[language]}")
        lines.append("")
    return "\n".join([f"<!-- corrections:{section} -->", *lines, "<!-- /corrections -->"])


def _views(section: str, language: int) -> str:
    names = [
        name if language == 0 else chinese for name, (chinese, topics) in VIEWS.items() if section in topics.split()
    ]
    return (", ", "、")[language].join(names)


def _checklist(experiments: dict[str, Experiment], language: int) -> str:
    title, other, head = TITLES[language]
    notes = ("notes.md", "notes.zh-CN.md")[language]
    headings = re.findall(r'<a id="([\w-]+)"></a>\n## (.*)', (DOCS / notes).read_text(encoding="utf-8"))
    names = dict(headings)
    rows = []
    for number, section, code, status, *texts in statements():
        covering = ", ".join(f"`{e.name}`" for e in experiments.values() if int(number) in e.checklist)
        correction = " ".join(
            filter(None, (f"**{STATUS[status][language]}**" if status != "ok" else "", texts[language]))
        )
        link = f"[{Path(code).name}](../src/clearhead/{code})"
        topic, views = f"[{names[section]}]({notes}#{section})", _views(section, language)
        rows.append(f"| {number} | {topic} | {link} | {views} | {covering} | {correction} |")
    return (
        "\n".join([title, "", other, "", INTRO[language], "", head, "| ---: | --- | --- | --- | --- | --- |", *rows])
        + "\n"
    )


def main() -> None:
    """Write the pages, or check that they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--results", type=Path, nargs="*", help="folders of results to add or replace")
    arguments = parser.parse_args()
    for folder in arguments.results or ():
        add_records(load_results(folder))
    stale = []
    for path, text in pages(all_experiments(), *committed_records()).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if not arguments.check:
                path.write_text(text, encoding="utf-8")
    if arguments.check and stale:
        sys.exit(f"not up to date: {', '.join(stale)}; run: python -m tools.guide")


if __name__ == "__main__":
    main()
