"""Model cards: the README.md of a model folder with its data, scores, recipe and license."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True)
class Score:
    """A metric's value, the data it was measured on, and the metric's signature."""

    metric: str
    value: float
    data: str
    signature: str = ""


@dataclass(frozen=True)
class Card:
    """The contents of a model card; missing sections are empty, since users write and edit cards."""

    summary: str = ""
    data: tuple[str, ...] = ()
    scores: tuple[Score, ...] = ()
    recipe: str = ""
    license: str = ""


def read_card(text: str) -> Card:
    """Parse a card written by `model_card`."""
    head, *rest = re.split(r"^## +", text, flags=re.M)
    sections = {title.strip().lower(): body.strip() for title, _, body in (part.partition("\n") for part in rest)}
    summary = re.sub(r"\A# .*", "", head.strip()).strip()
    data = re.findall(r"^- (.*)", sections.get("data", ""), flags=re.M)
    recipe = _read_recipe(sections.get("recipe", ""))
    license = sections.get("license", sections.get("licence", ""))  # cards of format version 1 have "Licence"
    return Card(summary, tuple(data), _read_scores(sections.get("scores", "")), recipe, license)


def _read_recipe(section: str) -> str:
    """Return the lines of the first block of YAML, between fences of the same length; empty if there is none."""
    lines = iter(section.split("\n"))
    fence = next((line.removesuffix("yaml") for line in lines if re.fullmatch(r"`{3,}yaml", line)), "")
    return "".join(f"{line}\n" for line in takewhile(lambda line: line != fence, lines))


def _read_scores(table: str) -> tuple[Score, ...]:
    """Parse a table of scores, skipping rows of another form."""
    scores = []
    for line in table.splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", cells[1]):
            scores.append(Score(cells[0], float(cells[1]), cells[2], cells[3]))
    return tuple(scores)


def model_card(
    name: str, summary: str, data: Sequence[str], recipe: str, scores: Sequence[Score], license: str, use: str = ""
) -> str:
    """Return a model card in Markdown: `data` are sentences about the corpora, `recipe` is YAML, `use` a command."""
    parts = [f"# {_one_line(name)}", summary.strip()]
    if use:
        parts += ["## Use", _fenced(use, "sh")]
    parts += ["## Data", "\n".join(f"- {_one_line(each)}" for each in data) or "Not stated."]
    parts += ["## Scores", _table(scores) if scores else "Not measured."]
    parts += ["## Recipe", _fenced(recipe, "yaml"), "## License", license.strip() or "Not stated."]
    return "\n\n".join(parts) + "\n"


def replace_score(text: str, score: Score) -> str:
    """Return a card in which the table of scores ends with this one, instead of an older score of the metric."""
    scores = [each for each in read_card(text).scores if each.metric != score.metric]
    head, section = re.split(r"^## Scores\n", text, maxsplit=1, flags=re.M)
    rest = re.split(r"^(?=## )", section, maxsplit=1, flags=re.M)[1]
    return f"{head}## Scores\n\n{_table([*scores, score])}\n\n{rest}"


def _table(scores: Sequence[Score]) -> str:
    rows = [("metric", "value", "measured on", "signature"), ("---", "---:", "---", "---")]
    rows += [(each.metric, f"{each.value:.4g}", each.data, each.signature) for each in scores]
    return "\n".join("| " + " | ".join(_one_line(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _fenced(text: str, language: str) -> str:
    """Return a code block whose fence is longer than any inside it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.strip()}\n{fence}"
