"""Fill the pages of the guide from the lab's results: `python -m tools.guide`, with --check only compare.

docs/lab/results.json   the records of all experiments, copied from a results folder with --results DIR
docs/lab/report.html    the report
docs/notes*.md          the blocks between <!-- lab:NAME --> and <!-- /lab -->
docs/checklist*.md      the table of 150 statements, from docs/lab/checklist.tsv
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from clearhead.lab.experiment import Experiment
from clearhead.lab.registry import all_experiments
from clearhead.lab.report import OUTCOMES, report
from clearhead.lab.runner import load_results
from clearhead.lab.verdict import Verdict, judge

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "lab" / "results.json"
BLOCK = re.compile(r"<!-- lab:([\w-]+) -->\n.*?<!-- /lab -->", re.S)
STATUS = {"ok": ("", ""), "imprecise": ("imprecise", "不准确"), "wrong": ("wrong", "有误")}
TITLES = (
    ("# 150 statements", "[中文](checklist.zh-CN.md)", "| | topic | code | experiment | correction |"),
    ("# 150 条说法", "[English](checklist.md)", "| | 主题 | 代码 | 实验 | 更正 |"),
)
INTRO = (
    "Five study notes about the Transformer make 150 statements, numbered in the order of the notes. Each has its topic"
    " in [the guide](notes.md), its code, and the experiments of the lab that test it. An empty last column: as the"
    " notes say.",
    "五份 Transformer 学习笔记共有 150 条说法，按笔记的顺序编号。"
    "每条对应[指南](notes.zh-CN.md)中的主题、代码，以及检验它的实验。"
    "最后一列为空，表示笔记的说法无误。",
)


def statements() -> list[list[str]]:
    """Return the rows of the checklist: number, section, code, status, correction in English and Chinese."""
    lines = (DOCS / "lab" / "checklist.tsv").read_text(encoding="utf-8").splitlines()
    return [[*line.split("\t"), "", ""][:6] for line in lines]


def pages(experiments: dict[str, Experiment], records: dict[str, dict[str, Any]]) -> dict[Path, str]:
    """Return the generated pages."""
    finished = {name: (e, records[name]["results"]) for name, e in experiments.items() if name in records}
    verdicts = judge(finished)
    result = {}
    for language, suffix in enumerate(("", ".zh-CN")):
        path = DOCS / f"notes{suffix}.md"

        def block(match: re.Match[str], language: int = language) -> str:
            name = match[1]
            inner = _verdicts(experiments[name], verdicts.get(name), records.get(name), language)
            return f"<!-- lab:{name} -->\n{inner}<!-- /lab -->"

        result[path] = BLOCK.sub(block, path.read_text(encoding="utf-8"))
        result[DOCS / f"checklist{suffix}.md"] = _checklist(experiments, language)
    result[DOCS / "lab" / "report.html"] = report(experiments, records)
    return result


def _verdicts(
    experiment: Experiment, verdicts: list[Verdict] | None, record: dict[str, Any] | None, language: int
) -> str:
    """The claim and its verdicts as a quotation."""
    lines = [f"> **{experiment.claim[language]}** `clearhead lab run {experiment.name}`"]
    if verdicts is None or record is None:
        lines.append(("> Not in the committed report yet.", "> 尚未写入已提交的报告。")[language])
    else:
        for prediction, verdict in zip(experiment.predictions, verdicts, strict=True):
            factor, unit = (100, " %") if prediction.relative else (1, "")
            effect = f"{factor * verdict.effect:+.3g}{unit}"
            if not prediction.exact:
                effect += f" [{factor * verdict.low:+.3g}, {factor * verdict.high:+.3g}]"
            colon = ": " if language == 0 else "："
            text = f"{prediction.text[language]}{colon}**{OUTCOMES[verdict.outcome][language]}**"
            lines.append(f"> - {text} ({prediction.metric} {effect})")
        lines.append(f">\n> {record['hardware']}, {record['scale']}, n = {record['seeds']}")
    return "\n".join([lines[0], ">", *lines[1:]]) + "\n"


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
        link = f"[{code}](../src/clearhead/{code})"
        rows.append(f"| {number} | [{names[section]}]({notes}#{section}) | {link} | {covering} | {correction} |")
    return (
        "\n".join([title, "", other, "", INTRO[language], "", head, "| ---: | --- | --- | --- | --- |", *rows]) + "\n"
    )


def main() -> None:
    """Write the pages, or check that they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--results", type=Path, nargs="*", help="folders of results; later ones replace earlier ones")
    arguments = parser.parse_args()
    if arguments.results:
        records: dict[str, Any] = {}
        for folder in arguments.results:
            records |= load_results(folder)
        RESULTS.write_text(json.dumps(records, ensure_ascii=False, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    records = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    stale = []
    for path, text in pages(all_experiments(), records).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if not arguments.check:
                path.write_text(text, encoding="utf-8")
    if arguments.check and stale:
        sys.exit(f"not up to date: {', '.join(stale)}; run: python -m tools.guide")


if __name__ == "__main__":
    main()
