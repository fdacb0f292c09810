"""Fill the pages of the guide from the lab's results: `python -m tools.guide`, with --check only compare.

docs/lab/results.json   the records of the experiments in full size, copied from results folders with --results DIR …
docs/lab/quick.json     those in quick size, which stand in where there is no other
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
from clearhead.lab.report import report
from clearhead.lab.runner import load_results
from clearhead.lab.verdict import Verdict, judge
from clearhead.lab.wording import OUTCOMES, effect, means, samples, scale

DOCS = Path(__file__).parents[1] / "docs"
RESULTS, QUICK = DOCS / "lab" / "results.json", DOCS / "lab" / "quick.json"
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


def committed() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the committed records, full and quick."""
    full, quick = (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {} for path in (RESULTS, QUICK))
    return full, quick


def pages(
    experiments: dict[str, Experiment], full: dict[str, dict[str, Any]], quick: dict[str, dict[str, Any]]
) -> dict[Path, str]:
    """Return the generated pages."""
    records = {name: record for name, record in {**quick, **full}.items() if name in experiments}
    finished = {name: (experiments[name], record["results"]) for name, record in records.items()}
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
    result[DOCS / "lab" / "report.html"] = report(experiments, full, quick)
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
            colon, bracket = ((": ", " ({})"), ("：", "（{}）"))[language]
            text = f"{prediction.text[language]}{colon}**{OUTCOMES[verdict.outcome][language]}**"
            numbers = f"{means(prediction, record['results'], language)}{colon}{effect(prediction, verdict)}"
            lines.append(f"> - {text}{bracket.format(numbers)}")
        facts = ((", ", "，")[language]).join(filter(None, [scale(record, language), samples(experiment, verdicts)]))
        lines.append(f">\n> {facts}")
        if experiment.note[language]:
            lines.append(f"> {experiment.note[language]}")
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
    parser.add_argument("--results", type=Path, nargs="*", help="folders of results to add or replace")
    arguments = parser.parse_args()
    if arguments.results:
        records: dict[str, Any] = {}
        for folder in arguments.results:
            records |= load_results(folder)
        for path, size, old in zip((RESULTS, QUICK), ("full", "quick"), committed(), strict=True):
            new = old | {name: record for name, record in records.items() if record["scale"] == size}
            path.write_text(
                json.dumps(dict(sorted(new.items())), ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
            )
    stale = []
    for path, text in pages(all_experiments(), *committed()).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if not arguments.check:
                path.write_text(text, encoding="utf-8")
    if arguments.check and stale:
        sys.exit(f"not up to date: {', '.join(stale)}; run: python -m tools.guide")


if __name__ == "__main__":
    main()
