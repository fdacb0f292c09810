"""`clearhead.train`: train a recipe into a run folder, from Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.config.load import read_yaml
from clearhead.config.recipe import Recipe, recipe_text
from clearhead.config.settings import nearest
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.predict import Model


@dataclass(frozen=True)
class TrainResult:
    """A finished (or stopped) run: its folder, steps done, and the best value of the validation metric."""

    folder: Path
    steps: int
    metric: str
    best: float | None  # None without validation
    finished: bool  # False: stopped by Ctrl-C; resume=True continues

    def load(self, device: str = "auto", dtype: str | None = None, compiled: bool = False) -> Model:
        """Load the best model of the run, else the last."""
        from clearhead.predict import load

        return load(self.folder, device, dtype, compiled)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "folder": str(self.folder)}


def train(
    recipe: str | Path | Recipe | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overrides: Mapping[str, Any] | None = None,
    log: Callable[[str], None] = lambda line: None,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    **settings: Any,
) -> TrainResult:
    """Train a recipe (a name, a YAML file, or settings) in the run folder `out` (default: runs/NAME).

    `train("mini-en-de", train__steps=10)` and `train("mini-en-de", overrides={"train.steps": 10})` change a setting.
    `log` receives status messages, `on_event` every event of the run log; `resume` continues the run in `out`.
    """
    from clearhead.train.loop import train as run

    _check_arguments(recipe, out, overrides, {"log": log, "on_event": on_event}, settings)
    changes = {key.replace("__", "."): value for key, value in settings.items()} | dict(overrides or {})
    where = str(recipe) if isinstance(recipe, str | Path) else "recipe"
    if isinstance(recipe, str | Path):
        data: Any = read_yaml(recipe_text(str(recipe)), str(recipe))
        out = out or Path("runs") / Path(recipe).stem
    else:
        data = recipe.model_dump(mode="json", exclude_unset=True) if isinstance(recipe, Recipe) else recipe
    if out is None:
        raise UserError("out: missing; name the run folder")
    built = Recipe.build(override(data, changes), where=where)
    folder = Path(out)
    summary = run(built, folder, resume=resume, log=log, on_event=on_event)
    return TrainResult(folder, summary.step, built.train.metric, summary.best, not summary.stopped)


def _check_arguments(recipe: Any, out: Any, overrides: Any, functions: Mapping[str, Any], settings: Any) -> None:
    """Refuse arguments of wrong types, and misspelled ones: they arrive among the settings."""
    known = ["out", "resume", "overrides", *functions]
    groups = {each: each.replace("__", ".").partition(".")[0] for each in settings}
    if name := next((each for each, group in groups.items() if each == group not in Recipe.model_fields), None):
        raise UserError(f"{name}: unknown argument{nearest(name, [*known, *Recipe.model_fields])}")
    if not isinstance(recipe, str | Path | Recipe | Mapping):
        kind = type(recipe).__name__
        raise UserError(f"recipe: {kind} is not a recipe; give a name from `clearhead recipes`, a file, or settings")
    if out is not None and not isinstance(out, str | os.PathLike):
        raise UserError(f"out: {type(out).__name__} is not a path; give a string or a Path")
    if overrides is not None and not (
        isinstance(overrides, Mapping) and all(isinstance(key, str) for key in overrides)
    ):
        raise UserError(
            f"overrides: {overrides!r:.40} is not a dict of names and values; write overrides={{'train.steps': 10}}"
        )
    for name, function in functions.items():
        if not callable(function):
            raise UserError(f"{name}: {type(function).__name__} is not a function; give one, or leave it out")


def override(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with dotted keys replaced."""
    data = dict(data)
    for key, value in changes.items():
        *groups, last = key.split(".")
        group = data
        for depth, name in enumerate(groups):
            below = group.get(name)
            if below is not None and not isinstance(below, Mapping):
                raise UserError(f"{key}: {'.'.join(groups[: depth + 1])} is {below!r:.40}, not a group of settings")
            group[name] = group = dict(below or {})
        group[last] = value
    return data
