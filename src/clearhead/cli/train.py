"""`clearhead train` and `clearhead recipes`: train a model from a recipe, list the recipes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.display import Display
from clearhead.cli.options import utf8_path
from clearhead.cli.output import echo, echo_json
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.config.recipe import Recipe
    from clearhead.train.loop import Summary


def recipes(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False) -> None:
    """List the packaged recipes.

    Example: clearhead recipes
    """
    from clearhead.config.recipe import load_recipe, recipe_names, recipe_text

    names = recipe_names()
    descriptions = {name: recipe_text(name).splitlines()[0].lstrip("# ") for name in names}
    if as_json:
        rows = [{"name": n, "task": load_recipe(n).data.task, "description": descriptions[n]} for n in names]
        echo_json(rows, indent=2)
        return
    width = max(map(len, names))
    for name, description in descriptions.items():
        echo(f"{name:{width}}  {description}")


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Name from `clearhead recipes`, or a YAML file.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", help="Overrides, like train.steps=500.")
    ] = None,
    out: Annotated[Path | None, typer.Option(callback=utf8_path, help="Run folder. Default: runs/RECIPE.")] = None,
    resume: Annotated[bool, typer.Option(help="Resume the run in --out, or start it.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Run two steps and one validation, and print the recipe.")] = False,
    device: Annotated[str | None, typer.Option(help="Same as train.device.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Same as train.precision: fp32, bf16, fp16 or fp64.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same as train.seed.", min=0)] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of runs with different seeds.", min=1, max=1000)] = None,
    lrs: Annotated[str | None, typer.Option(help="Learning rates to compare, like 2e-5,5e-5.")] = None,
) -> None:
    """Train a model from a recipe; Ctrl-C saves a checkpoint and stops, --resume continues.

    Example: clearhead train mini-en-de train.steps=500 --out runs/first

    SIGTERM, SIGHUP and SIGUSR1 save and stop too; the exit code of a stopped run is 128 + the number of the signal.

    With --seeds or --lrs, train one run per combination and print a table of means and standard deviations.
    """
    from clearhead.cli.new import refuse_data_as_recipe
    from clearhead.config.dtypes import FLOAT_DTYPES, parse_dtype
    from clearhead.config.recipe import load_recipe

    refuse_data_as_recipe(recipe)
    overrides = list(changes or ())
    overrides += [f"train.device={device}"] if device is not None else []
    overrides += [f"train.precision={parse_dtype(dtype, FLOAT_DTYPES, '--dtype')}"] if dtype is not None else []
    overrides += [f"train.seed={seed}"] if seed is not None else []
    loaded = load_recipe(recipe, overrides)
    if dry_run:
        from clearhead.train.dry_run import dry_run as run_dry

        with Display() as display:
            lines = run_dry(loaded, display.log)
        for line in lines:
            echo(line)
        return
    folder = out or Path("runs") / Path(recipe).stem
    if seeds is None and lrs is None:
        _run(loaded, folder, resume)
    else:
        _sweep(loaded, folder, resume, seeds or 1, _parse_lrs(lrs) or [loaded.train.lr])


def _run(recipe: "Recipe", out: Path, resume: bool) -> None:
    from clearhead.train.loop import train as run_training

    with Display(recipe.train.steps) as display:
        summary = run_training(recipe, out, resume=resume, log=display.log, on_event=display.on_event)
        if summary.is_main:
            display.end(_end_line(summary, recipe, out))
    if summary.stopped:
        raise typer.Exit(128 + summary.signal)


def _end_line(summary: "Summary", recipe: "Recipe", out: Path) -> str:
    if summary.stopped:
        when = f"at step {summary.step:,} of {summary.steps:,}" if summary.step else "before the first step"
        then = f"continue with: clearhead train … --out {out} --resume" if out.exists() else "nothing was written"
        return f"stopped {when}; {then}"
    best = f"; best {recipe.train.metric} {summary.best:.4g}" if summary.best is not None else ""
    return f"done: {summary.step:,} steps{best}; report: {out / 'report.html'}"


def _parse_lrs(text: str | None) -> list[float]:
    """Parse learning rates separated by commas, without duplicates."""
    from clearhead.config.train import ScheduleConfig

    lrs: list[float] = []
    for part in text.split(",") if text is not None else ():
        try:
            value = float(part)
        except ValueError:
            raise UserError(f"--lrs: {part!r} is not a number; write learning rates like 2e-5,5e-5") from None
        ScheduleConfig.build({"lr": value}, where="--lrs")
        lrs.append(value)
    return list(dict.fromkeys(lrs))


def _sweep(recipe: "Recipe", out: Path, resume: bool, seeds: int, lrs: list[float]) -> None:
    from clearhead.train.signals import Stopped
    from clearhead.train.sweep import lines, sweep

    with Display(recipe.train.steps) as display:
        try:
            table = sweep(recipe, out, lrs, seeds, resume, display.log, display.on_event)
        except Stopped as stop:
            display.end(f"stopped; continue with: clearhead train … --out {out} --resume")
            raise typer.Exit(128 + stop.signal) from None
        if table is not None:
            display.end(f"done: {out / 'table.md'}; best model: {out / 'best'}")
    if table is not None:
        for line in lines(table, recipe.train.metric):
            echo(line)
