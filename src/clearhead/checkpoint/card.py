"""The model card: what a model was made of and how good it is, as the README.md of its folder."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """A measured value, with what it was measured on and the signature by which others can repeat it."""

    metric: str
    value: float
    data: str
    signature: str = ""


def model_card(
    name: str, summary: str, data: Sequence[str], recipe: str, scores: Sequence[Score], licence: str, use: str = ""
) -> str:
    """A model card in Markdown: `data` are sentences about the corpora, `recipe` is YAML, `use` a command line."""
    parts = [f"# {_line(name)}", summary.strip()]
    if use:
        parts += ["## Use", _fenced(use, "sh")]
    parts += ["## Data", "\n".join(f"- {_line(each)}" for each in data) or "Not stated."]
    parts += ["## Scores", _table(scores) if scores else "Not measured."]
    parts += ["## Recipe", _fenced(recipe, "yaml"), "## Licence", licence.strip() or "Not stated."]
    return "\n\n".join(parts) + "\n"


def _table(scores: Sequence[Score]) -> str:
    rows = [("metric", "value", "measured on", "signature"), ("---", "---:", "---", "---")]
    rows += [(each.metric, f"{each.value:.4g}", each.data, each.signature) for each in scores]
    return "\n".join("| " + " | ".join(_line(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)


def _line(text: str) -> str:
    return " ".join(text.split())


def _fenced(text: str, language: str) -> str:
    """A block of code whose fence is longer than any inside it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.strip()}\n{fence}"
