"""`clearhead train` and `clearhead recipes`: a recipe, changed by key=value, into a run folder."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.config.recipe import Recipe


def recipes(as_json: Annotated[bool, typer.Option("--json", help="For programs: a list of objects.")] = False) -> None:
    """List the recipes that come with the package.

    Example: clearhead recipes
    """
    from clearhead.config.recipe import load_recipe, recipe_names, recipe_text

    found = [
        (name, load_recipe(name).data.task, recipe_text(name).splitlines()[0].lstrip("# ")) for name in recipe_names()
    ]
    if as_json:
        typer.echo(json.dumps([{"name": n, "task": t, "about": about} for n, t, about in found], indent=2))
        return
    width = max(len(name) for name, _, _ in found)
    for name, _, about in found:
        typer.echo(f"{name:{width}}  {about}")


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A name from `clearhead recipes`, or a YAML file.")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Like train.steps=500.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; without it, runs/RECIPE.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the run in the folder, or begin it.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Two steps and one validation; writes only the token cache.")] = False,
    device: Annotated[str | None, typer.Option(help="Short for train.device.")] = None,
    seed: Annotated[int | None, typer.Option(help="Short for train.seed.", min=0)] = None,
    seeds: Annotated[int | None, typer.Option(help="So many runs, each with another seed.", min=1, max=1000)] = None,
    rates: Annotated[str | None, typer.Option(help="Learning rates to compare, like 2e-5,5e-5.")] = None,
) -> None:
    """Train a model by a recipe; Ctrl-C saves and stops, --resume goes on.

    Example: clearhead train mini-en-de train.steps=500 --out runs/first

    With --seeds or --rates, there is a run for each, and a table of means and spreads.
    """
    from clearhead.config.recipe import load_recipe

    given = list(changes or ())
    given += [f"train.device={device}"] if device is not None else []
    given += [f"train.seed={seed}"] if seed is not None else []
    loaded = load_recipe(recipe, given)
    if dry_run:
        from clearhead.train.dry_run import dry_run as rehearse

        for line in rehearse(loaded, _say):
            typer.echo(line)
        return
    folder = out or Path("runs") / Path(recipe).stem
    if seeds is None and rates is None:
        _run(loaded, folder, resume)
    else:
        _compare(loaded, folder, resume, seeds or 1, _rates(rates) or [loaded.train.lr])


def _run(recipe: "Recipe", out: Path, resume: bool) -> None:
    from clearhead.train.loop import train as learn

    with Display(recipe.train.steps) as display:
        summary = learn(recipe, out, resume=resume, say=display.say, watch=display.watch)
    if not summary.first:
        return
    if summary.stopped:
        when = f"at step {summary.step:,} of {summary.steps:,}" if summary.step else "before the first step"
        then = f"clearhead train … --out {out} --resume goes on" if out.exists() else "nothing was written"
        _say(f"stopped {when}; {then}")
    else:
        best = f"; best {recipe.train.metric} {summary.best:.4g}" if summary.best is not None else ""
        _say(f"done: {summary.step:,} steps{best}; {out / 'report.html'} shows how it went")


def _rates(text: str | None) -> list[float]:
    """The numbers between commas, each once."""
    from clearhead.config.train import ScheduleConfig

    found: list[float] = []
    for part in text.split(",") if text is not None else ():
        try:
            value = float(part)
        except ValueError:
            raise UserError(f"--rates: {part!r} is not a number; write them like 2e-5,5e-5") from None
        ScheduleConfig.build({"lr": value}, where="--rates")
        found.append(value)
    return list(dict.fromkeys(found))


def _compare(recipe: "Recipe", out: Path, resume: bool, seeds: int, rates: list[float]) -> None:
    from clearhead.train.sweep import lines, sweep

    with Display(recipe.train.steps) as display:
        table = sweep(recipe, out, rates, seeds, resume, display.say, display.watch)
    if table is None:
        _say(f"no table yet; clearhead train … --out {out} --resume goes on")
        return
    for line in lines(table, recipe.train.metric):
        typer.echo(line)
    _say(f"done: {out / 'table.md'}; the best model is in {out / 'best'}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Display:
    """A progress bar on a terminal, plain lines when piped."""

    def __init__(self, steps: int):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

        self.console = Console(stderr=True, highlight=False)
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

    def say(self, line: str) -> None:
        """A line for people."""
        self.console.print(line, markup=False, soft_wrap=True)

    def watch(self, event: dict[str, Any]) -> None:
        """An event of the log."""
        show: dict[str, Callable[[dict[str, Any]], None]] = {"step": self._step, "validation": self._validation}
        if event["kind"] in show:
            show[event["kind"]](event)

    def _step(self, event: dict[str, Any]) -> None:
        peak = f" · {event['mfu']:.0%} of peak" if "mfu" in event else ""
        text = f"loss {event['loss']:.3f} · {event['tokens_per_second']:,.0f} tokens/s{peak}"
        if self.bar:
            self.bar.update(self.task, completed=event["step"], description=text)
        else:
            self.say(f"step {event['step']:,}/{self.steps:,} · {text}")

    def _validation(self, event: dict[str, Any]) -> None:
        names = (
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
        found = " · ".join(f"{name.replace('_', ' ')} {event[name]:.4g}" for name in names if name in event)
        self.say(f"step {event['step']:,} validation · {found}")
        for sample in event["samples"][:1]:
            for name, text in sample.items():
                self.say(f"    {name:9} {' '.join(text.split())[:100]}")
