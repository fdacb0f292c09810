"""`clearhead train` and `clearhead recipes`: train a model from a recipe, list the recipes."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.options import utf8_path
from clearhead.cli.output import echo, echo_json
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.config.recipe import Recipe

METRICS = (
    "loss",
    "perplexity",
    "accuracy",
    "bleu",
    "chrf",
    "f1",
    "exact",
    "matthews",
    "pearson",
    "spearman",
    "exposure_bias",
)


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

    With --seeds or --lrs, train one run per combination and print a table of means and standard deviations.
    """
    from clearhead.config.dtypes import FLOAT_DTYPES, parse_dtype
    from clearhead.config.recipe import load_recipe

    overrides = list(changes or ())
    overrides += [f"train.device={device}"] if device is not None else []
    overrides += [f"train.precision={parse_dtype(dtype, FLOAT_DTYPES, '--dtype')}"] if dtype is not None else []
    overrides += [f"train.seed={seed}"] if seed is not None else []
    loaded = load_recipe(recipe, overrides)
    if dry_run:
        from clearhead.train.dry_run import dry_run as run_dry

        for line in run_dry(loaded, _print_error):
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
    if not summary.is_main:
        return
    if summary.stopped:
        when = f"at step {summary.step:,} of {summary.steps:,}" if summary.step else "before the first step"
        then = f"continue with: clearhead train … --out {out} --resume" if out.exists() else "nothing was written"
        _print_error(f"stopped {when}; {then}")
    else:
        best = f"; best {recipe.train.metric} {summary.best:.4g}" if summary.best is not None else ""
        _print_error(f"done: {summary.step:,} steps{best}; report: {out / 'report.html'}")


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
    from clearhead.train.sweep import lines, sweep

    with Display(recipe.train.steps) as display:
        table = sweep(recipe, out, lrs, seeds, resume, display.log, display.on_event)
    if table is None:
        _print_error(f"stopped; continue with: clearhead train … --out {out} --resume")
        return
    for line in lines(table, recipe.train.metric):
        echo(line)
    _print_error(f"done: {out / 'table.md'}; best model: {out / 'best'}")


def _print_error(line: str) -> None:
    echo(line, err=True)


class Display:
    """A progress bar on a terminal, plain lines in a pipe."""

    def __init__(self, steps: int):
        from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

        from clearhead.cli.console import Console

        self.console = Console(err=True)
        self.steps = steps
        self.bar: Progress | None = None
        self.task = TaskID(0)
        if self.console.is_terminal:
            count, text = TextColumn("{task.completed:,.0f}/{task.total:,.0f}"), TextColumn("{task.description}")
            self.bar = Progress(count, BarColumn(None), text, TimeRemainingColumn(), console=self.console)
            self.task = self.bar.add_task("", total=steps)

    def __enter__(self) -> "Display":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def log(self, line: str) -> None:
        """Print a line."""
        self.console.print(line, soft_wrap=True)

    def on_event(self, event: dict[str, Any]) -> None:
        """Show an event of the run log."""
        handlers: dict[str, Callable[[dict[str, Any]], None]] = {"step": self._step, "validation": self._validation}
        if event["kind"] in handlers:
            handlers[event["kind"]](event)

    def _step(self, event: dict[str, Any]) -> None:
        peak = f" · {event['mfu']:.0%} of peak" if "mfu" in event else ""
        text = f"loss {event['loss']:.3f} · {event['tokens_per_second']:,.0f} tokens/s{peak}"
        if self.bar:
            self.bar.update(self.task, completed=event["step"], description=text)
        else:
            self.log(f"step {event['step']:,}/{self.steps:,} · {text}")

    def _validation(self, event: dict[str, Any]) -> None:
        metrics = " · ".join(f"{name.replace('_', ' ')} {event[name]:.4g}" for name in METRICS if name in event)
        self.log(f"step {event['step']:,} validation · {metrics}")
        for sample in event["samples"][:1]:
            for name, text in sample.items():
                self.log(f"    {name:9} {' '.join(text.split())[:100]}")
