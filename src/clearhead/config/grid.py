"""Overrides with several values, like train.lr=1e-4,3e-4: the grid of recipes that a sweep trains."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel

from clearhead.config.load import apply_overrides, parse_yaml, read_yaml
from clearhead.config.model import ModelConfig
from clearhead.config.recipe import Recipe, recipe_text
from clearhead.errors import ConfigError

MAX_RUNS = 300  # of a sweep
PRESET = "model.preset"  # takes a name, like a Literal
REFUSED = {
    "train.seed": "give the number of seeds with --seeds",
    "train.metric": "the runs are compared by one metric; choose one",
}

Values = Mapping[str, Any]


class GridPoint(NamedTuple):
    """One recipe of a grid, and the values that set it apart, by key."""

    values: Values
    recipe: Recipe


def load_grid(name: str, changes: Iterable[str] = (), seeds: int = 1) -> list[GridPoint]:
    """Load a recipe once for every combination of the values in `changes`, the last key varying fastest."""
    data = read_yaml(recipe_text(name), name)
    fixed, swept = split_changes(changes)
    sizes = {key: len(texts) for key, texts in swept.items()} | {"seeds": seeds}
    if (runs := math.prod(sizes.values())) > MAX_RUNS:
        factors = " × ".join(f"{size:,} ({key})" for key, size in sizes.items())
        raise ConfigError(f"{runs:,} runs are too many for a sweep: {factors}; try at most {MAX_RUNS}")
    points = []
    for texts in itertools.product(*swept.values()):
        overrides = [f"{key}={text}" for key, text in zip(swept, texts, strict=True)]
        values = {key: parse_yaml(text, key) for key, text in zip(swept, texts, strict=True)}
        points.append(GridPoint(values, Recipe.build(apply_overrides(data, [*fixed, *overrides]), where=name)))
    return points


def split_changes(changes: Iterable[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Split overrides into those of one value, and keys with the texts of several different values."""
    fixed, swept = list[str](), dict[str, list[str]]()
    for change in changes:
        key, _, text = change.partition("=")
        key = key.strip()
        swept.pop(key, None)  # the later one counts
        if "," in text and takes_one_value(key) and isinstance(parse_yaml(text, key), str):
            if key in REFUSED:
                raise ConfigError(f"{key}: {text} are several values; {REFUSED[key]}")
            swept[key] = _values(key, text)
        else:
            fixed.append(change)
    return fixed, swept


def _values(key: str, text: str) -> list[str]:
    texts = [part.strip() for part in text.split(",")]
    if not all(texts):
        raise ConfigError(f"{key}: {text!r} has an empty value; write values like 1e-4,3e-4")
    different: dict[str, str] = {}
    for part in texts:
        different.setdefault(repr(parse_yaml(part, key)), part)
    return list(different.values())


def takes_one_value(key: str) -> bool:
    """Whether a setting is a number, true or false, or one of a few names, so that a comma separates values to try."""
    group: type[BaseModel] = Recipe
    path = key.split(".")
    if path[0] == "model" and len(path) > 1:
        group, path = ModelConfig, path[1:]
    for name in path[:-1]:
        field = group.model_fields.get(name)
        parts = [] if field is None else [part for kind in _kinds(field.annotation) for part in (kind, *get_args(kind))]
        below = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
        if not below:
            return False
        group = below[0]
    field = group.model_fields.get(path[-1])
    kinds = [] if field is None else list(_kinds(field.annotation))
    return key == PRESET or any(kind in (int, float, bool) or get_origin(kind) is Literal for kind in kinds)


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types of a union, without annotations."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for part in get_args(annotation):
            yield from _kinds(part)
    else:
        yield annotation


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key, or the whole key where two end alike: train.lr → lr."""
    last = {key: key.rpartition(".")[2] for key in keys}
    ends = list(last.values())
    return {key: end if ends.count(end) == 1 else key for key, end in last.items()}


def point_name(values: Values) -> str:
    """Return the values of a grid point as the start of a folder's name: lr-0.0001-heads-4-."""
    names = short_names(list(values))
    return "".join(re.sub(r"[^\w.+-]", "-", f"{names[key]}-{value_text(value)}-") for key, value in values.items())


def value_text(value: Any) -> str:
    """Return a value as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
