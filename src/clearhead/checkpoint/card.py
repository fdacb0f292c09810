"""The model card: what a model was made of and how good it is, as the README.md of its folder."""

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """A measured value, with what it was measured on and the signature by which others can repeat it."""

    metric: str
    value: float
    data: str
    signature: str = ""


@dataclass(frozen=True)
class Card:
    """What a model card says; empty where it says nothing, since people write and edit them."""

    summary: str = ""
    data: tuple[str, ...] = ()
    scores: tuple[Score, ...] = ()
    recipe: str = ""
    license: str = ""


def read_card(text: str) -> Card:
    """A card as `model_card` writes it."""
    head, *rest = re.split(r"^## +", text, flags=re.M)
    sections = {title.strip().lower(): body.strip() for title, _, body in (part.partition("\n") for part in rest)}
    summary = re.sub(r"\A# .*", "", head.strip()).strip()
    data = re.findall(r"^- (.*)", sections.get("data", ""), flags=re.M)
    recipe = re.search(r"^(`{3,})yaml\n(.*?)^\1$", sections.get("recipe", "") + "\n", flags=re.M | re.S)
    scores, license = _scores(sections.get("scores", "")), sections.get("license", "")
    return Card(summary, tuple(data), scores, recipe[2] if recipe else "", license)


def _scores(table: str) -> tuple[Score, ...]:
    """The rows of a table of scores; a row that is none is left out."""
    found = []
    for line in table.splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", cells[1]):
            found.append(Score(cells[0], float(cells[1]), cells[2], cells[3]))
    return tuple(found)


def model_card(
    name: str, summary: str, data: Sequence[str], recipe: str, scores: Sequence[Score], license: str, use: str = ""
) -> str:
    """A model card in Markdown: `data` are sentences about the corpora, `recipe` is YAML, `use` a command line."""
    parts = [f"# {_line(name)}", summary.strip()]
    if use:
        parts += ["## Use", _fenced(use, "sh")]
    parts += ["## Data", "\n".join(f"- {_line(each)}" for each in data) or "Not stated."]
    parts += ["## Scores", _table(scores) if scores else "Not measured."]
    parts += ["## Recipe", _fenced(recipe, "yaml"), "## License", license.strip() or "Not stated."]
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
