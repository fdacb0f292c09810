"""A run that was interrupted and went on is the run that was not: losses, weights, optimizer, data order, to the bit.

CLEARHEAD_INTERRUPTIONS=20 interrupts every family at 20 random steps.
"""

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.checkpoint import load_model, newest_state
from clearhead.config.recipe import Recipe, load_recipe
from clearhead.data import GlobalBatch
from clearhead.errors import UserError
from clearhead.train import validate
from clearhead.train.run import Run
from tests.train.tiny import FAMILIES, distance, events, losses, recipe, run, tensors

INTERRUPTIONS = int(os.environ.get("CLEARHEAD_INTERRUPTIONS", "3"))
STEPS = 24
# Nothing falls together: a stop is between two lines of the log, two validations and two checkpoints.
RHYTHM: dict[str, Any] = {"steps": STEPS, "log_every": 5, "validate_every": 7, "save_every": 4, "scored": 2}


class Watched:
    """Runs a recipe, notes the samples of every step, and stops after a step as SIGTERM would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.order: list[list[int]] = []
        self.stop_after = 0
        learn = Run.learn

        def noted(run: Run, item: GlobalBatch) -> bool:
            done = learn(run, item)
            if done:
                self.order.append([item.plan.epoch, *item.plan.samples.tolist()])
            if run.step == self.stop_after:
                signal.raise_signal(signal.SIGTERM)
            return done

        monkeypatch.setattr(Run, "learn", noted)

    def __call__(self, out: Path, made: Recipe, stop_after: int = 0) -> list[str]:
        self.stop_after = stop_after
        said: list[str] = []
        summary = run(out, made, resume=True, say=said.append)
        assert summary.stopped == bool(stop_after)
        assert summary.step == (stop_after or made.train.steps)
        return said


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def models(out: Path) -> dict[str, Tensor]:
    """The weights of the best and the last model."""
    return {
        f"{name} {key}": tensor.clone()
        for name in ("best", "last")
        for key, tensor in load_model(out / name).network.state_dict().items()
    }


def told(out: Path) -> list[dict[str, Any]]:
    """What the log says about learning, wherever it started."""
    return [event for event in events(out) if event["kind"] != "start"]


def same(left: Path, right: Path) -> None:
    assert told(left) == told(right)
    assert distance(tensors(left), tensors(right)) == 0
    assert distance(models(left), models(right)) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_an_interrupted_run_ends_like_one_that_was_not(family: str, tmp_path: Path, watched: Watched) -> None:
    made = recipe(family, **RHYTHM)
    watched(tmp_path / "whole", made)
    order, watched.order = watched.order, []
    assert len(order) == STEPS
    assert order[-1][0] > 0, "the interruptions lie in several epochs"
    chosen = random.Random(family).sample(range(1, STEPS), INTERRUPTIONS)
    for stop in chosen:
        out = tmp_path / f"stopped at {stop}"
        watched(out, made, stop)
        assert newest_state(out)[0].step == stop  # type: ignore[union-attr]
        assert f"going on from step {stop} of {STEPS}" in watched(out, made)
        assert watched.order == order
        watched.order = []
        same(tmp_path / "whole", out)


def test_many_interruptions_of_one_run_change_nothing(tmp_path: Path, watched: Watched) -> None:
    made = recipe("llama", **RHYTHM, average_checkpoints=2, patience=100)
    watched(tmp_path / "whole", made)
    for stop in (1, 2, 7, 14, 15, 23):
        watched(tmp_path / "often", made, stop)
    watched(tmp_path / "often", made)
    assert watched.order[STEPS:] == watched.order[:STEPS]
    same(tmp_path / "whole", tmp_path / "often")


def test_a_validation_that_was_broken_off_is_made_up_for(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe("gpt", **RHYTHM)
    watched(tmp_path / "whole", made)
    inner, asked = validate.losses, iter([1, 1, 0, 1, 0, 0, 1, 1, 0])

    def interrupted(*given: Any) -> dict[str, float]:
        if next(asked):
            signal.raise_signal(signal.SIGTERM)
        return inner(*given)

    monkeypatch.setattr(validate, "losses", interrupted)
    found = [run(tmp_path / "stopped", made, resume=True) for _ in range(6)]
    assert [summary.step for summary in found] == [7, 7, 14, 24, 24, 24]
    assert [summary.stopped for summary in found] == [True] * 5 + [False]
    assert [event["step"] for event in events(tmp_path / "stopped", "validation")] == [7, 14, 21, 24]
    same(tmp_path / "whole", tmp_path / "stopped")


def test_a_validation_made_up_for_just_before_the_next_stop_is_told_once(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step comes between it and the stop, so that no checkpoint knows of it."""
    made = recipe("gpt", **RHYTHM)
    watched(tmp_path / "whole", made)
    inner, moments = validate.losses, iter(["before", "after", "after"])

    def interrupted(*given: Any) -> dict[str, float]:
        moment = next(moments, None)
        if moment == "before":
            signal.raise_signal(signal.SIGTERM)
        found = inner(*given)
        if moment == "after":
            signal.raise_signal(signal.SIGTERM)
        return found

    monkeypatch.setattr(validate, "losses", interrupted)
    found = [run(tmp_path / "stopped", made, resume=True) for _ in range(4)]
    assert [summary.step for summary in found] == [7, 7, 7, 24]
    assert [event["step"] for event in events(tmp_path / "stopped", "validation")] == [7, 14, 21, 24]
    same(tmp_path / "whole", tmp_path / "stopped")


def test_more_steps_are_learned_as_if_they_had_been_asked_for_at_once(tmp_path: Path, watched: Watched) -> None:
    for steps, out in ((12, "twice"), (18, "twice"), (18, "once")):
        watched(tmp_path / out, recipe("bert", steps=steps, schedule="constant", save_every=4, average_checkpoints=2))
    assert [e["loss"] for e in events(tmp_path / "twice", "step")] == losses(tmp_path / "once")
    assert distance(tensors(tmp_path / "twice"), tensors(tmp_path / "once")) == 0
    assert [event["step"] for event in events(tmp_path / "twice", "validation")] == [12, 18, 18]
    assert [event["step"] for event in events(tmp_path / "once", "validation")] == [18, 18], "the second is of the mean"
    assert load_recipe(str(tmp_path / "twice" / "recipe.yaml")).train.steps == 18
    assert [(e["step"], e["steps"]) for e in events(tmp_path / "twice", "start")] == [(0, 12), (12, 18)]


def test_no_step_is_in_the_log_twice_after_a_crash(tmp_path: Path, watched: Watched) -> None:
    """Killed between two checkpoints (here: by an error), the run goes back to the last, and so does its log."""
    made = recipe("gpt", **(RHYTHM | {"log_every": 1, "save_every": 10}))
    for crash in (3, 17):  # before any checkpoint, and after one
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "crashed", made, resume=True, watch=lambda event: 1 / (event["step"] - crash))  # noqa: B023
    watched(tmp_path / "crashed", made)
    assert [event["step"] for event in events(tmp_path / "crashed", "step")] == list(range(1, STEPS + 1))
    watched(tmp_path / "whole", made)
    same(tmp_path / "whole", tmp_path / "crashed")


def test_a_run_killed_inside_its_first_save_begins_anew(tmp_path: Path, watched: Watched) -> None:
    (tmp_path / "out" / "checkpoints" / ".step-00000004.tmp-999999999").mkdir(parents=True)
    (tmp_path / "out" / "log.jsonl").write_text('{"kind": "start", "step": 0}\n{"kind": "step", "step": 1}\n')
    made = recipe("gpt", **RHYTHM)
    watched(tmp_path / "out", made)
    watched(tmp_path / "whole", made)
    same(tmp_path / "whole", tmp_path / "out")
    assert not list((tmp_path / "out" / "checkpoints").glob(".*"))


def test_a_run_killed_before_its_last_model_still_gets_it(tmp_path: Path, watched: Watched) -> None:
    made = recipe("gpt", **RHYTHM, average_checkpoints=2)
    watched(tmp_path / "whole", made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "save_model", lambda run, name: 1 / (name != "last"))
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "killed", made)
    assert not (tmp_path / "killed" / "last").exists()
    watched(tmp_path / "killed", made)
    assert told(tmp_path / "killed") == told(tmp_path / "whole")
    last = [load_model(tmp_path / name / "last").network.state_dict() for name in ("killed", "whole")]
    assert distance(last[0], last[1]) == 0
    with pytest.raises(UserError, match=r"train\.steps: 24 is the total, and .*killed is at 24; ask for more"):
        run(tmp_path / "killed", made, resume=True)


@pytest.mark.parametrize("damage", ["cut", "bit", "gone", "manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    damage: str, tmp_path: Path, watched: Watched
) -> None:
    made = recipe("gpt", **RHYTHM)
    watched(tmp_path / "whole", made)
    watched(tmp_path / "out", made, 10)
    folder = tmp_path / "out" / "checkpoints" / "step-00000010"
    file = folder / ("manifest.json" if damage == "manifest" else "optimizer.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    said = watched(tmp_path / "out", made)
    refused = next(line for line in said if line.startswith(str(file if damage != "manifest" else folder)))
    assert refused.endswith("; trying the one before it")
    assert "going on from step 8 of 24" in said
    same(tmp_path / "whole", tmp_path / "out")


def test_a_run_without_a_whole_checkpoint_is_refused(tmp_path: Path, watched: Watched) -> None:
    made = recipe("gpt", **RHYTHM)
    watched(tmp_path / "out", made, 2)
    (tmp_path / "out" / "checkpoints" / "step-00000002" / "weights.safetensors").write_bytes(b"")
    before = (tmp_path / "out" / "log.jsonl").read_bytes()
    with pytest.raises(UserError, match="no checkpoint is whole; begin anew in another folder"):
        run(tmp_path / "out", made, resume=True)
    assert (tmp_path / "out" / "log.jsonl").read_bytes() == before


def test_how_a_run_is_done_may_change_but_not_what_it_learns(tmp_path: Path, watched: Watched) -> None:
    watched(tmp_path / "whole", recipe("gpt", **RHYTHM))
    watched(tmp_path / "out", recipe("gpt", **RHYTHM), 9)
    other = RHYTHM | {"save_every": 3, "keep": 1, "recompute": True}
    watched(tmp_path / "out", recipe("gpt", "data.workers=2", **other))
    assert distance(tensors(tmp_path / "out"), tensors(tmp_path / "whole")) == 0
    assert len(list((tmp_path / "out" / "checkpoints").iterdir())) == 1


def test_fp16_goes_on_with_its_scale(tmp_path: Path, watched: Watched) -> None:
    made = recipe("gpt", **RHYTHM, precision="fp16")
    seen: list[tuple[float, int]] = []
    close = Run.close

    def noted(run: Run) -> None:
        assert run.updater.scaler is not None
        seen.append((run.updater.scaler.scale, run.updater.scaler.steps))
        close(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "close", noted)
        watched(tmp_path / "whole", made)
        watched(tmp_path / "out", made, 9)
        watched(tmp_path / "out", made)
    assert seen[0] == seen[2] == (2.0**16, STEPS)
    assert seen[1] == (2.0**16, 9)
    same(tmp_path / "whole", tmp_path / "out")


def test_smaller_parts_after_a_lack_of_memory_stay_smaller(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout is drawn for each part: the run would not be the same if it went back to whole batches."""
    made = recipe("gpt", **RHYTHM)
    watched(tmp_path / "whole", recipe("gpt", **RHYTHM, grad_accum=2))
    forward, failed = torch.nn.Module.__call__, []

    def once(module: torch.nn.Module, *given: Any, **named: Any) -> Any:
        if type(module).__name__ == "Objective" and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError
        return forward(module, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "__call__", once)
        watched(tmp_path / "out", made, 9)
    watched(tmp_path / "out", made)
    assert distance(tensors(tmp_path / "out"), tensors(tmp_path / "whole")) == 0
