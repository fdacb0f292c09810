"""The report of the lab: one self-contained HTML page in English and Chinese, with every claim, figure and verdict."""

from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import Any

from clearhead.lab.experiment import Experiment, Prediction, Text
from clearhead.lab.figure import draw
from clearhead.lab.verdict import Verdict, judge

OUTCOMES = {
    "held": Text("held", "成立"),
    "not held": Text("not held", "不成立"),
    "no difference": Text("no difference", "无差异"),
    "undecided": Text("undecided", "未定"),
}
DIRECTIONS = {"higher": Text("higher by at least", "至少高"), "lower": Text("lower by at least", "至少低"),
              "same": Text("equal within", "差别不超过")}  # fmt: skip
INTRO = Text(
    "Each claim was turned into predictions with a direction and the smallest effect that matters; their hash was stored"
    " before the first run. Every variant had its own learning rate from a small grid. Effects are paired by seed, with"
    " 95% intervals; verdicts are corrected over all predictions of this page (Holm), so that the chance of any false one"
    " stays below 5%. “No difference” means shown to be smaller than what matters; “undecided” means that more seeds are"
    " needed. The models are small: a verdict is about this scale.",
    "每个论断都先写成预测：方向，以及有意义的最小效应；预测的哈希在第一次运行之前存下。每个变体都在小网格上选取自己的学习率。"
    "效应按种子配对，附 95% 置信区间；判定对本页所有预测做 Holm 校正，出现任何一个错误判定的概率低于 5%。“无差异”表示已证明"
    "效应小于有意义的程度；“未定”表示需要更多种子。模型很小，判定只针对这一规模。",
)


def report(experiments: Mapping[str, Experiment], records: Mapping[str, dict[str, Any]]) -> str:
    """Return the page for the experiments that have a record."""
    finished = {name: (e, records[name]["results"]) for name, e in experiments.items() if name in records}
    verdicts = judge(finished)
    counts: Counter[str] = Counter(verdict.outcome for row in verdicts.values() for verdict in row)
    seeds = sum(record["seconds"] for name, record in records.items() if name in finished)
    summary = ", ".join(f"{counts[outcome]} {text.en}" for outcome, text in OUTCOMES.items())
    summary_zh = "，".join(f"{counts[outcome]} 个{text.zh}" for outcome, text in OUTCOMES.items())
    total = Text(
        f"{len(finished)} experiments, {sum(counts.values())} predictions: {summary}. {seeds / 60:.0f} minutes of computing.",
        f"{len(finished)} 个实验，{sum(counts.values())} 个预测：{summary_zh}。共计算 {seeds / 60:.0f} 分钟。",
    )
    parts = [both("h1", Text("The lab: claims about Transformers, tested", "实验室：检验关于 Transformer 的论断"))]
    parts += [both("p", INTRO), both("p", total, "total"), _index(experiments, verdicts)]
    parts += [_section(e, records[name], verdicts[name]) for name, (e, _) in finished.items()]
    return PAGE.format(style=STYLE, body="\n".join(parts))


def both(tag: str, text: Text, kind: str = "") -> str:
    """An element in both languages; the page shows one of them."""
    return "".join(
        f'<{tag} class="{language} {kind}" lang="{code}">{escape(part)}</{tag}>'
        for language, code, part in (("en", "en", text.en), ("zh", "zh-CN", text.zh))
    )


def _index(experiments: Mapping[str, Experiment], verdicts: Mapping[str, list[Verdict]]) -> str:
    rows = "".join(
        f'<tr><td><a href="#{name}">{both("span", experiments[name].title)}</a></td><td>'
        + " ".join(_badge(verdict) for verdict in row)
        + "</td></tr>"
        for name, row in verdicts.items()
    )
    return f"<table>{rows}</table>"


def _badge(verdict: Verdict) -> str:
    return both("b", OUTCOMES[verdict.outcome], verdict.outcome.replace(" ", "-"))


def _section(experiment: Experiment, record: dict[str, Any], verdicts: list[Verdict]) -> str:
    items = "".join(_prediction(p, v) for p, v in zip(experiment.predictions, verdicts, strict=True))
    figures = "".join(
        f"<figure>{both('figcaption', figure.title)}"
        + "".join(
            f'<div class="{name}">{draw(figure, record["results"], i)}</div>' for i, name in enumerate(("en", "zh"))
        )
        + "</figure>"
        for figure in experiment.figures
    )
    facts = Text(
        f"{record['hardware']} · {record['scale']} · {record['seeds']} seeds · {record['date'][:10]} · {record['seconds']:.0f} s",
        f"{record['hardware']} · {record['scale']} · {record['seeds']} 个种子 · {record['date'][:10]} · {record['seconds']:.0f} 秒",
    )
    predicted = Text(
        f"Predicted {record['predicted_at']}, SHA-256 {record['prediction_hash'][:16]}",
        f"预测于 {record['predicted_at']}，SHA-256 {record['prediction_hash'][:16]}",
    )
    numbers = Text("Checklist ", "清单 ")
    checklist = ", ".join(map(str, experiment.checklist))
    papers = f'<p class="facts">{escape("; ".join(experiment.papers))}</p>' if experiment.papers else ""
    return (
        f'<section id="{experiment.name}">{both("h2", experiment.title)}{both("p", experiment.claim, "claim")}'
        f'<ul>{items}</ul><div class="figures">{figures}</div>{both("p", experiment.note) if experiment.note.en else ""}{papers}'
        f"{both('p', facts, 'facts')}{both('p', predicted, 'facts')}"
        f'<p class="facts">{both("span", numbers)}{checklist}</p><pre>{escape(record["command"])}</pre></section>'
    )


def _prediction(prediction: Prediction, verdict: Verdict) -> str:
    unit = "%" if prediction.relative else ""
    factor = 100 if prediction.relative else 1
    numbers = f"{factor * verdict.effect:+.3g}{unit}"
    if not prediction.exact:
        numbers += f" [{factor * verdict.low:+.3g}, {factor * verdict.high:+.3g}], n = {verdict.seeds}"
    at_least = f"{prediction.metric}: {{}} {factor * prediction.at_least:g}{unit}"
    rule = Text(*(at_least.format(word) for word in DIRECTIONS[prediction.direction]))
    return f"<li>{_badge(verdict)} {both('span', prediction.text)} <code>{numbers}</code> {both('span', rule, 'facts')}</li>"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Clearhead lab · 实验室</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>{style}</style></head><body>
<input type="radio" name="language" id="to-en" checked><label for="to-en">English</label>
<input type="radio" name="language" id="to-zh"><label for="to-zh">中文</label>
<main>
{body}
</main></body></html>
"""
STYLE = """
:root { color-scheme: light dark; --ground: #faf9f6; --card: #fff; --ink: #23272e; --soft: #6c727b; --rule: #e8e5df;
  --held: #3f7d4e; --not: #b5483a; --none: #2a6f97; --open: #7a7f87 }
@media (prefers-color-scheme: dark) { :root { --ground: #16181b; --card: #1e2125; --ink: #e4e3df; --soft: #999fa8;
  --rule: #31353b; --held: #6fb681; --not: #e08a7c; --none: #74b6dd; --open: #999fa8 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 960px; padding: 1.5rem 1.25rem 4rem; background: var(--ground); color: var(--ink);
  font: 15px/1.6 system-ui, "Noto Sans CJK SC", sans-serif; font-variant-numeric: tabular-nums }
#to-en:checked ~ main .zh, #to-zh:checked ~ main .en { display: none }
h1 { font-size: 1.6rem; font-weight: 600 } h2 { font-size: 1.2rem; font-weight: 600; margin: 0 }
section { margin-top: 2rem; padding: 1.2rem 1.4rem; background: var(--card); border: 1px solid var(--rule); border-radius: 10px }
.total { font-weight: 600 } .claim { font-size: 1.05rem } .facts { color: var(--soft); font-size: .82rem; margin: .3rem 0 }
table { width: 100%; border-collapse: collapse } td { padding: .25rem .6rem .25rem 0; border-top: 1px solid var(--rule) }
a { color: var(--none); text-decoration: none } ul { padding-left: 0; list-style: none } li { margin: .4rem 0 }
b { display: inline-block; font-size: .78rem; font-weight: 600; padding: 0 .5em; border-radius: 6px; color: var(--card);
  background: var(--open) }
b.held { background: var(--held) } b.not-held { background: var(--not) } b.no-difference { background: var(--none) }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 1rem }
figure { margin: 0 } figcaption { font-weight: 600; font-size: .9rem } svg { width: 100%; height: auto }
pre, code { font-size: .82rem } pre { overflow-x: auto; color: var(--soft); margin: .4rem 0 0 }
"""
