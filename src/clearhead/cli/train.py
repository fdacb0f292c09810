"""`clearhead train` and `clearhead recipes`: train a model from a recipe, list the recipes."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.display import Display
from clearhead.cli.options import utf8_path
from clearhead.cli.output import echo, echo_json, say
from clearhead.ops.openmp import spin_briefly

if TYPE_CHECKING:
    from clearhead.config.grid import GridPoint
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
        list[str] | None,
        typer.Argument(
            metavar="key=value",
            help="Overrides, like train.steps=500; train.lr=1e-4,3e-4 tries both.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(callback=utf8_path, help="Run folder. Default: runs/RECIPE.")] = None,
    init_from: Annotated[
        str | None,
        typer.Option("--from", metavar="MODEL", help="Fine-tune this model; RECIPE may then be a table of your data."),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Resume the run in --out, or start it.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Run two steps and one validation, and print the recipe.")] = False,
    device: Annotated[str | None, typer.Option(help="Same as train.device.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Same as train.precision: fp32, bf16, fp16 or fp64.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same as train.seed.", min=0)] = None,
    seeds: Annotated[int | None, typer.Option(help="Train every recipe with this many seeds.", min=1)] = None,
) -> None:
    """Train a model from a recipe; Ctrl-C saves a checkpoint and stops, --resume continues.

    Example: clearhead train mini-en-de train.steps=500 --out runs/first
    Example: clearhead train reviews.csv --from hf:distilbert/distilbert-base-uncased

    SIGTERM, SIGHUP and SIGUSR1 save and stop too; the exit code of a stopped run is 128 + the number of the signal.

    With several values (model.heads=4,8) or --seeds, train one run per combination; OUT/report.html compares them.
    """
    from clearhead.cli.new import recipe_of_data, refuse_data_as_recipe

    spin_briefly()  # before torch is imported
    from clearhead.config.dtypes import FLOAT_DTYPES, parse_dtype
    from clearhead.config.grid import load_grid

    overrides = list(changes or ())
    if init_from is not None:
        recipe = recipe_of_data(recipe, init_from)
        overrides.append(f"model.init_from={init_from}")
    refuse_data_as_recipe(recipe)
    overrides += [f"train.device={device}"] if device is not None else []
    overrides += [f"train.precision={parse_dtype(dtype, FLOAT_DTYPES, '--dtype')}"] if dtype is not None else []
    overrides += [f"train.seed={seed}"] if seed is not None else []
    grid = load_grid(recipe, overrides, seeds or 1)
    if dry_run:
        from clearhead.train.dry_run import dry_run as run_dry

        with Display() as display:
            if len(grid) > 1:
                display.log(f"dry run of the first of {len(grid):,} recipes")
            resolved, *lines = run_dry(grid[0].recipe, display.log)
        echo(resolved)
        for line in lines:
            say(line)
        return
    folder = out or Path("runs") / Path(recipe).stem
    if seeds is None and not grid[0].values:
        _run(grid[0].recipe, folder, resume, _resume_command(recipe, overrides, folder, seeds))
    else:
        _sweep(grid, seeds or 1, folder, resume, _resume_command(recipe, overrides, folder, seeds))


def _resume_command(recipe: str, overrides: list[str], out: Path, seeds: int | None) -> str:
    """The command that continues this run."""
    arguments = ["clearhead", "train", recipe, *overrides, *([] if seeds is None else ["--seeds", str(seeds)])]
    return shlex.join([*arguments, "--out", str(out), "--resume"])


def _run(recipe: "Recipe", out: Path, resume: bool, command: str) -> None:
    from clearhead.train.loop import train as run_training

    with Display(recipe.train.steps) as display:
        summary = run_training(recipe, out, resume=resume, log=display.log, on_event=display.on_event)
        if summary.is_main:
            display.end(_end_line(summary, recipe, out, command))
    if summary.stopped:
        raise typer.Exit(128 + summary.signal)


def _end_line(summary: "Summary", recipe: "Recipe", out: Path, command: str) -> str:
    if summary.stopped:
        when = f"at step {summary.step:,} of {summary.steps:,}" if summary.step else "before the first step"
        then = f"continue with: {command}" if out.exists() else "nothing was written"
        return f"stopped {when}; {then}"
    best = f"; best {recipe.train.metric} {summary.best:.4g}" if summary.best is not None else ""
    return f"done: {summary.step:,} steps{best}; report: {out / 'report.html'}"


def _sweep(grid: "list[GridPoint]", seeds: int, out: Path, resume: bool, command: str) -> None:
    from clearhead.train.signals import Stopped
    from clearhead.train.sweep import lines, sweep

    with Display(max(point.recipe.train.steps for point in grid)) as display:
        try:
            table = sweep(grid, seeds, out, resume, display.log, display.on_event)
        except Stopped as stop:
            display.end(f"stopped; continue with: {command}")
            raise typer.Exit(128 + stop.signal) from None
        if table is not None:
            display.end(f"done; best model: {out / 'best'}; report: {out / 'report.html'}")
    if table is not None:
        for line in lines(table, grid[0].recipe.train.metric):
            echo(line)
