"""The loop: one function for every family and task. Load, step, log, validate, save."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clearhead.config.recipe import Recipe
from clearhead.errors import UserError
from clearhead.train.parallel import place
from clearhead.train.run import Run, Say, Watch
from clearhead.train.stop import Stopper


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    step: int
    steps: int
    best: float | None
    stopped: bool  # asked to stop before the end


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
    if not resume and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already; go on with --resume, or choose another --out")
    settings = recipe.train
    with Stopper() as stopper, place(settings.device) as here:
        run = Run(recipe, out, here, say, watch)
        try:
            if resume:
                run.resume()
            items = run.items()
            while run.step < settings.steps and not here.any(bool(stopper)):
                if not run.learn(next(items)):
                    items = run.items()  # the same batch again, in smaller parts
                    continue
                if run.due(settings.log_every):
                    run.log()
                if run.due(settings.validate_every):
                    run.validate(lambda: bool(stopper))
                if run.due(settings.save_every):
                    run.save()
                if settings.patience is not None and run.waited >= settings.patience:
                    run.say(f"no better {settings.metric} for {run.waited} validations: stopping")
                    break
            run.finish()
        finally:
            run.close()
    return Summary(run.step, settings.steps, run.best, bool(stopper))
