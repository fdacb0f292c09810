"""The page of a report: HTML frame and style, sections, and numbers as text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

MAX_CHARS = 2000  # of a text
PERCENTAGES = ("accuracy", "f1", "exact", "precision", "recall")
NAMES = {"bleu": "BLEU", "chrf": "chrF", "f1": "F1", "exact": "exact match", "lr": "learning rate"}


def page(title: str, parts: Sequence[str]) -> str:
    """Return a self-contained page without scripts."""
    text = PAGE.format(title=title, style=STYLE, body="\n".join(filter(None, parts)))
    return text.encode("utf-8", "replace").decode()  # samples may contain lone surrogates


def section(title: str, inner: str) -> str:
    """Return a part of the page under a title; empty without content."""
    return f"<section><h2>{title}</h2>{inner}</section>" if inner else ""


def fold(title: str, inner: str) -> str:
    """Return a part of the page that is shown after a click; empty without content."""
    return f"<details><summary>{title}</summary>{inner}</details>" if inner else ""


def tile(name: str, value: str, details: Sequence[str], hint: Any = "") -> str:
    """Return a box with one number and a line per detail; `hint` is shown under the mouse."""
    spans = "".join(f"<span>{line}</span>" for line in filter(None, details))
    return f'<div class="tile" title="{cut(hint)}"><span>{name}</span><b>{value}</b>{spans}</div>'


def cut(text: Any, max_chars: int = MAX_CHARS) -> str:
    """Escape a text for HTML, shortened to `max_chars`."""
    text = str(text)
    return escape(text if len(text) <= max_chars else text[: max_chars - 1] + "…")


def heading(key: str) -> str:
    """Return the name of a number in the log as a title."""
    text = NAMES.get(key, key.replace("_", " "))
    return escape(text[:1].upper() + text[1:])


def is_fraction(key: str) -> bool:
    """Whether a number is a fraction of 1, shown in percent."""
    return key in PERCENTAGES or key.endswith("_accuracy")


def show(value: float, key: str = "") -> str:
    """Format a number for text."""
    if is_fraction(key):
        return f"{value:.1%}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def short(value: float, key: str = "") -> str:
    """Format a number for an axis."""
    if is_fraction(key):
        return f"{100 * value:.4g}%"
    size, unit = next(
        (pair for pair in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if abs(value) >= 1.0001 * pair[0]), (1, "")
    )
    return f"{value / size:.4g}{unit}" if abs(value) < 1e12 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Format a time in its largest units."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if minutes < 60:
        return f"{seconds:.3g} s" if seconds < 99 else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>{style}</style></head><body>
{body}
</body></html>
"""
STYLE = """
:root { color-scheme: light dark; --ground: #faf9f6; --card: #fff; --ink: #23272e; --soft: #6c727b; --rule: #e8e5df;
  --c0: #2a6f97; --c1: #c8663a; --c2: #5d8a4a; --c3: #8a5a9e; --c4: #b08a1e; --c5: #4a8f8c; --c6: #b5486e;
  --c7: #7a6a58; --correct: #3f7d4e }
@media (prefers-color-scheme: dark) { :root { --ground: #16181b; --card: #1e2125; --ink: #e4e3df; --soft: #999fa8;
  --rule: #31353b; --c0: #74b6dd; --c1: #eda06e; --c2: #a3cb8c;
  --c3: #c9a3dc; --c4: #e3c467; --c5: #86cfcb; --c6: #ec92b3; --c7: #c4b19c;
  --correct: #8cc79a } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1080px; padding: 2.5rem 1.25rem 4rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums }
h1 { font-size: 1.7rem; font-weight: 600; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1rem; font-weight: 600; margin: 0 }
header p, section > p { margin: .25rem 0 1.5rem; color: var(--soft) }
section, details { margin-top: 2rem }
section > h2 { font-size: 1.15rem; margin-bottom: .75rem }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(145px, 1fr)); gap: .75rem }
.tile, figure, table, pre { background: var(--card); border: 1px solid var(--rule); border-radius: 10px }
.tile { padding: .8rem 1rem }
.tile span { display: block }
.tile b { display: block; font-size: 1.5rem; font-weight: 600; line-height: 1.35 }
.tile span, figcaption span { color: var(--soft); font-size: .8rem }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: .75rem }
.tiles { margin-bottom: .75rem }
figure { margin: 0; padding: .9rem 1rem .6rem; min-width: 0; display: flex; flex-direction: column;
  justify-content: space-between }
figcaption { display: flex; flex-wrap: wrap; gap: 0 .6rem; align-items: baseline; margin-bottom: .4rem }
figcaption ul { display: flex; flex-wrap: wrap; gap: 0 1rem; list-style: none; margin: 0 0 0 auto; padding: 0;
  font-size: .8rem }
figcaption li::before { content: ""; display: inline-block; width: .7em; height: .7em; border-radius: 50%;
  margin-right: .4em; background: currentColor }
figure:has(.c2) .band { opacity: .1 }
.c0 { color: var(--c0) } .c1 { color: var(--c1) } .c2 { color: var(--c2) } .c3 { color: var(--c3) }
.c4 { color: var(--c4) } .c5 { color: var(--c5) } .c6 { color: var(--c6) } .c7 { color: var(--c7) }
svg { display: block; width: 100%; height: auto; overflow: visible }
svg text { fill: var(--soft); font-size: 12px }
.axis { stroke: var(--rule) } .line { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round;
  stroke-linecap: round } .band { fill: currentColor; opacity: .22 }
circle { fill: transparent; stroke: transparent; stroke-width: 9 }
circle:hover, .few circle { fill: currentColor }
table { width: 100%; border-collapse: separate; border-spacing: 0; padding: .5rem 1rem; margin-bottom: .75rem }
th { width: 7.5rem; padding: .2rem .8rem .2rem 0; color: var(--soft); font-weight: 400; text-align: left;
  vertical-align: top; white-space: nowrap }
td { overflow-wrap: anywhere; white-space: pre-wrap; padding: .2rem 0 }
td.correct::after { content: " ✓"; color: var(--correct) }
.map { display: block; overflow-x: auto; padding: 1rem; width: max-content; max-width: 100% }
.map svg { width: auto; max-width: none }
.map rect { fill: color-mix(in srgb, var(--c0) var(--share), var(--ground)) }
.runs { display: block; overflow-x: auto }
.runs th, .runs td { width: auto; padding: .25rem 1.2rem .25rem 0; white-space: nowrap; text-align: left }
.runs td:last-child { white-space: normal }
.runs i { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .5em;
  background: currentColor }
.runs tr:nth-child(2) b { color: var(--correct) }
a { color: var(--c0) }
.confusion { display: block; overflow-x: auto; width: max-content; max-width: 100% }
.confusion th { width: auto; vertical-align: middle; text-align: right }
.confusion tr:first-child th { vertical-align: bottom; text-align: center; padding: 0 0 .4rem }
.confusion th span { writing-mode: vertical-rl; rotate: 180deg }
.confusion td { min-width: 2.6rem; height: 2.6rem; padding: 0 .3rem; text-align: center; border: 1px solid var(--card);
  border-radius: 5px; background: color-mix(in srgb, var(--c0) var(--share), var(--ground)) }
.confusion .full { color: var(--card) }
summary { cursor: pointer; font-weight: 600; margin-bottom: .75rem }
pre { padding: 1rem; overflow-x: auto; font-size: 13px }
@media (max-width: 600px) {
  body { padding-top: 1.5rem } svg text { font-size: 14px } th { width: 5.5rem; font-size: .85rem } }
@media (max-width: 440px) { svg text { font-size: 18px } }
"""
