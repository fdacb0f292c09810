"""The report of the lab: one self-contained HTML page in English and Chinese, with every claim, figure and verdict."""

from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import Any

from clearhead.lab.experiment import Experiment, Prediction, Results, Text
from clearhead.lab.figure import draw
from clearhead.lab.verdict import Verdict, judge
from clearhead.lab.wording import OUTCOMES, SCALES, effect, means, number, rule, scale

INTRO = Text(
    "Each claim was turned into predictions with a direction and the smallest effect that matters; their hash was stored"
    " before the first run. Every variant had its own learning rate from a small grid. Effects are paired by seed, with"
    " 95% intervals; verdicts are corrected over all predictions of this page (Holm), so that the chance of any false one"
    " stays below 5%. “No difference” means shown to be smaller than what matters; “undecided” means that more seeds are"
    " needed. Noise is the standard deviation of the baseline over the seeds. The models are small: a verdict is about"
    " this scale.",
    "每个论断都先写成预测：给出方向和有意义的最小效应，并在第一次运行之前存下预测的哈希。每个变体都在小网格上选取自己的学习率。"
    "效应按种子配对计算，附 95% 置信区间；判定对本页所有预测做 Holm 校正，出现任何一个错误判定的概率低于 5%。“无差异”表示已证明"
    "效应小于有意义的程度；“未定”表示需要更多种子。噪声是基准在各个种子之间的标准差。这里的模型都很小，判定只针对这一规模。",
)
Records = Mapping[str, dict[str, Any]]


def report(experiments: Mapping[str, Experiment], records: Records, others: Records | None = None) -> str:
    """Return the page; `others` are records of a second scale, which stand in for missing ones."""
    others = others or {}
    main = {name: records.get(name) or others[name] for name in experiments if name in records or name in others}
    finished = {name: (experiments[name], record["results"]) for name, record in main.items()}
    verdicts = judge(finished)
    second = {name: others[name] for name in main if name in others and name in records}
    second_verdicts = judge({name: (experiments[name], record["results"]) for name, record in second.items()})
    parts = [both("h1", Text("The lab: claims about Transformers, tested", "实验室：检验关于 Transformer 的论断"))]
    parts += [both("p", INTRO), both("p", _total(main, verdicts), "total")]
    parts += [both("p", text) for text in _gaps(experiments, main)]
    parts.append(_index(experiments, main, verdicts))
    for name, (experiment, _) in finished.items():
        also = _also(experiment, second[name], second_verdicts[name]) if name in second else ""
        parts.append(_section(experiment, main[name], verdicts[name], also))
    return PAGE.format(style=STYLE, body="\n".join(parts))


def both(tag: str, text: Text, kind: str = "") -> str:
    """An element in both languages; the page shows one of them."""
    return "".join(
        f'<{tag} class="{language} {kind}" lang="{code}">{escape(part)}</{tag}>'
        for language, code, part in (("en", "en", text.en), ("zh", "zh-CN", text.zh))
    )


def _total(records: Records, verdicts: Mapping[str, list[Verdict]]) -> Text:
    counts: Counter[str] = Counter(verdict.outcome for row in verdicts.values() for verdict in row)
    minutes = sum(record["seconds"] for record in records.values()) / 60
    words = [[f"{counts[outcome]} {text[language]}" for outcome, text in OUTCOMES.items()] for language in (0, 1)]
    return Text(
        f"{len(records)} experiments, {counts.total()} predictions: {', '.join(words[0])}."
        f" {minutes:.0f} minutes of computing.",
        f"{len(records)} 个实验，{counts.total()} 个预测：{'，'.join(words[1])}。共计算 {minutes:.0f} 分钟。",
    )


def _gaps(experiments: Mapping[str, Experiment], records: Records) -> list[Text]:
    """Say which experiments have no result, and which were run in the quick size only."""
    missing = [name for name in experiments if name not in records]
    quick = [name for name, record in records.items() if record["scale"] == "quick"]
    texts = []
    if missing:
        names = ", ".join(missing)
        texts.append(Text(f"Not run yet: {names}.", f"尚未运行：{names}。"))
    if quick and len(quick) < len(records):
        names = ", ".join(quick)
        texts.append(
            Text(
                f"Run in the quick size only ({len(quick)} of {len(records)}; smaller models, fewer steps and seeds): {names}.",
                f"只运行了快速规模（{len(records)} 个中的 {len(quick)} 个；模型更小，步数和种子更少）：{names}。",
            )
        )
    return texts


def _index(experiments: Mapping[str, Experiment], records: Records, verdicts: Mapping[str, list[Verdict]]) -> str:
    def row(name: str) -> str:
        quick = records[name]["scale"] == "quick"
        return (
            f'<tr><td><a href="#{name}">{both("span", experiments[name].title)}</a></td><td>'
            + " ".join(map(_badge, verdicts[name]))
            + (f' <span class="facts">{both("span", SCALES["quick"])}</span>' if quick else "")
            + "</td></tr>"
        )

    return f"<table>{''.join(map(row, verdicts))}</table>"


def _badge(verdict: Verdict) -> str:
    return both("b", OUTCOMES[verdict.outcome], verdict.outcome.replace(" ", "-"))


def _section(experiment: Experiment, record: dict[str, Any], verdicts: list[Verdict], also: str) -> str:
    results = record["results"]
    items = "".join(_prediction(p, v, results) for p, v in zip(experiment.predictions, verdicts, strict=True))
    figures = "".join(
        f"<figure>{both('figcaption', figure.title)}"
        + "".join(f'<div class="{name}">{draw(figure, results, i)}</div>' for i, name in enumerate(("en", "zh")))
        + "</figure>"
        for figure in experiment.figures
    )
    seconds = f"{record['seconds']:.0f}"
    facts = Text(
        f"{scale(record, 0)} · {record['seeds']} seeds · {record['date'][:10]} · {seconds} s",
        f"{scale(record, 1)} · {record['seeds']} 个种子 · {record['date'][:10]} · {seconds} 秒",
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
        f'<ul>{items}</ul>{also}<div class="figures">{figures}</div>'
        f"{both('p', experiment.note) if experiment.note.en else ''}{papers}"
        f"{both('p', facts, 'facts')}{both('p', predicted, 'facts')}"
        f'<p class="facts">{both("span", numbers)}{checklist}</p><pre>{escape(record["command"])}</pre></section>'
    )


def _prediction(prediction: Prediction, verdict: Verdict, results: Results) -> str:
    """The verdict of a prediction; below it the numbers, and what was predicted."""
    details = []
    for language in (0, 1):
        parts = [rule(prediction, language)]
        if not prediction.exact:
            noise = number(prediction.noise(results))
            parts = [f"n = {verdict.seeds}", *parts, (f"noise {noise}", f"噪声 {noise}")[language]]
        details.append(f"{means(prediction, results, language)} · " + " · ".join(parts))
    return (
        f"<li>{_badge(verdict)} {both('span', prediction.text)} <code>{effect(prediction, verdict)}</code>"
        f"{both('div', Text(*details), 'facts')}</li>"
    )


def _also(experiment: Experiment, record: dict[str, Any], verdicts: list[Verdict]) -> str:
    """The verdicts at a second scale, in one line."""
    words = (Text("Also run: ", "另外运行："), Text(scale(record, 0), scale(record, 1)))
    badges = " ".join(
        f"{_badge(v)} <code>{effect(p, v)}</code>" for p, v in zip(experiment.predictions, verdicts, strict=True)
    )
    return f'<p class="facts">{both("span", words[0])}{both("span", words[1])}: {badges}</p>'


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
@media (prefers-color-scheme: dark) { svg { filter: brightness(1.2) } :root { --ground: #16181b; --card: #1e2125; --ink: #e4e3df; --soft: #999fa8;
  --rule: #31353b; --held: #6fb681; --not: #e08a7c; --none: #74b6dd; --open: #999fa8 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 960px; padding: 1.5rem 1.25rem 4rem; background: var(--ground); color: var(--ink);
  font: 15px/1.6 system-ui, "Noto Sans CJK SC", sans-serif; font-variant-numeric: tabular-nums }
#to-en:checked ~ main .zh, #to-zh:checked ~ main .en { display: none }
h1 { font-size: 1.6rem; font-weight: 600 } h2 { font-size: 1.2rem; font-weight: 600; margin: 0 }
section { margin-top: 2rem; padding: 1.2rem 1.4rem; background: var(--card); border: 1px solid var(--rule); border-radius: 10px }
.total { font-weight: 600 } .claim { font-size: 1.05rem } .facts { color: var(--soft); font-size: .82rem; margin: .3rem 0 }
table { width: 100%; border-collapse: collapse } td { padding: .25rem .6rem .25rem 0; border-top: 1px solid var(--rule) } td .facts { white-space: nowrap }
a { color: var(--none); text-decoration: none } ul { padding-left: 0; list-style: none } li { margin: .4rem 0 }
b { display: inline-block; font-size: .78rem; font-weight: 600; padding: 0 .5em; border-radius: 6px; color: var(--card);
  background: var(--open) }
b.held { background: var(--held) } b.not-held { background: var(--not) } b.no-difference { background: var(--none) }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 1rem }
figure { margin: 0 } figcaption { font-weight: 600; font-size: .9rem } svg { width: 100%; max-width: 460px; height: auto }
pre, code { font-size: .82rem } pre { overflow-x: auto; color: var(--soft); margin: .4rem 0 0 }
@media (max-width: 500px) { body { padding: 1rem .6rem } section { padding: 1rem .7rem } }
"""
