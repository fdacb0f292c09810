"""The loop: one function for every family and task. Load, step, log, validate, save."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clearhead.config.recipe import Recipe
from clearhead.errors import UserError
from clearhead.train.distributed import dist_context
from clearhead.train.run import Run, Say, Watch
from clearhead.train.signals import Stopper


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    step: int
    steps: int
    best: float | None
    stopped: bool  # asked to, before all was done
    first: bool = True  # of several processes, the one that speaks for all


def check_folder(out: Path, resume: bool, own: tuple[str, ...]) -> None:
    """Refuse to write among other things; into a run, which has one of `own`, only if it shall go on."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    is_run = any(any(out.glob(name)) for name in own)
    if not is_run:
        raise UserError(f"{out} exists already, and is no run; choose another --out")
    if not resume:
        raise UserError(f"{out} exists already; go on with --resume, or choose another --out")


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    say: Say = lambda line: None,
    watch: Watch = lambda event: None,
) -> Summary:
    """Train what a recipe says, into the run folder `out`.

    `say` gets lines for people, `watch` every event of the log. With `resume`, the run in `out` goes on from its
    newest whole checkpoint, or begins where there is none.
    """
    check_folder(out, resume, (".lock", "recipe.yaml", "checkpoints"))
    settings = recipe.train
    with Stopper() as stopper, dist_context(settings.device) as here:
        try:
            run = Run(recipe, out, here, say, watch)
        except KeyboardInterrupt:
            return Summary(0, settings.steps, None, True, here.is_main)
        stopper.patient = True
        try:
            if resume:
                run.resume()
            if run.validation_pending:
                run.validate(lambda: bool(stopper))
            items = run.items()
            while not run.over and not here.any(bool(stopper)):
                if not run.learn(next(items)):
                    items = run.items()  # the same batch again, in smaller parts
                    continue
                if run.due(settings.log_every):
                    run.log()
                if run.due(settings.validate_every):
                    run.validate(lambda: bool(stopper))
                if run.due(settings.save_every):
                    run.save()
            stopped = here.any(bool(stopper))
            run.finish(stopped)
        finally:
            run.close()
    return Summary(run.step, settings.steps, run.best, stopped, here.is_main)
