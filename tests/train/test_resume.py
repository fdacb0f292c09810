"""A resumed run is bit-identical to an uninterrupted one: losses, weights, optimizer state, data order.

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

from clearhead.checkpoint import load_model, newest_checkpoint
from clearhead.config.recipe import Recipe, load_recipe
from clearhead.data import GlobalBatch
from clearhead.errors import UserError
from clearhead.train import loop, validate
from clearhead.train.state import RunState
from tests.train.tiny import FAMILIES, distance, events, losses, recipe, run, tensors

INTERRUPTIONS = int(os.environ.get("CLEARHEAD_INTERRUPTIONS", "3"))
STEPS = 24
# Different intervals, so that a stop falls between log lines, validations and checkpoints.
INTERVALS: dict[str, Any] = {"steps": STEPS, "log_every": 5, "validate_every": 7, "save_every": 4, "eval_samples": 2}


class Runner:
    """Runs a recipe, records the samples of every step, and sends SIGTERM after a given step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.order: list[list[int]] = []
        self.stop_after = 0
        train_step = loop.train_step

        def recorded(run: RunState, batch: GlobalBatch) -> bool:
            done = train_step(run, batch)
            if done:
                self.order.append([batch.plan.epoch, *batch.plan.samples.tolist()])
            if run.step == self.stop_after:
                signal.raise_signal(signal.SIGTERM)
            return done

        monkeypatch.setattr(loop, "train_step", recorded)

    def __call__(self, out: Path, made: Recipe, stop_after: int = 0) -> list[str]:
        self.stop_after = stop_after
        messages: list[str] = []
        summary = run(out, made, resume=True, log=messages.append)
        assert summary.stopped == bool(stop_after)
        assert summary.step == (stop_after or made.train.steps)
        return messages


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(monkeypatch)


def models(out: Path) -> dict[str, Tensor]:
    """The weights of the best and the last model."""
    return {
        f"{name} {key}": tensor.clone()
        for name in ("best", "last")
        for key, tensor in load_model(out / name).network.state_dict().items()
    }


def log(out: Path) -> list[dict[str, Any]]:
    """The log without start lines."""
    return [event for event in events(out) if event["kind"] != "start"]


def assert_equal_runs(left: Path, right: Path) -> None:
    assert log(left) == log(right)
    assert distance(tensors(left), tensors(right)) == 0
    assert distance(models(left), models(right)) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_resumed_run_equals_an_uninterrupted_one(family: str, tmp_path: Path, runner: Runner) -> None:
    made = recipe(family, **INTERVALS)
    runner(tmp_path / "uninterrupted", made)
    order, runner.order = runner.order, []
    assert len(order) == STEPS
    assert order[-1][0] > 0, "stops fall into several epochs"
    stops = random.Random(family).sample(range(1, STEPS), INTERRUPTIONS)
    for stop in stops:
        out = tmp_path / f"stopped at {stop}"
        runner(out, made, stop)
        assert newest_checkpoint(out)[0].step == stop  # type: ignore[union-attr]
        assert f"resuming from step {stop} of {STEPS}" in runner(out, made)
        assert runner.order == order
        runner.order = []
        assert_equal_runs(tmp_path / "uninterrupted", out)


def test_many_interruptions_of_one_run_change_nothing(tmp_path: Path, runner: Runner) -> None:
    made = recipe("llama", **INTERVALS, average_checkpoints=2, patience=100)
    runner(tmp_path / "uninterrupted", made)
    for stop in (1, 2, 7, 14, 15, 23):
        runner(tmp_path / "often", made, stop)
    runner(tmp_path / "often", made)
    assert runner.order[STEPS:] == runner.order[:STEPS]
    assert_equal_runs(tmp_path / "uninterrupted", tmp_path / "often")


def test_an_interrupted_validation_is_repeated_on_resume(
    tmp_path: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe("gpt", **INTERVALS)
    runner(tmp_path / "uninterrupted", made)
    inner, interrupts = validate.evaluate_losses, iter([1, 1, 0, 1, 0, 0, 1, 1, 0])

    def interrupted(*args: Any) -> dict[str, float]:
        if next(interrupts):
            signal.raise_signal(signal.SIGTERM)
        return inner(*args)

    monkeypatch.setattr(validate, "evaluate_losses", interrupted)
    summaries = [run(tmp_path / "stopped", made, resume=True) for _ in range(6)]
    assert [summary.step for summary in summaries] == [7, 7, 14, 24, 24, 24]
    assert [summary.stopped for summary in summaries] == [True] * 5 + [False]
    assert [event["step"] for event in events(tmp_path / "stopped", "validation")] == [7, 14, 21, 24]
    assert_equal_runs(tmp_path / "uninterrupted", tmp_path / "stopped")


def test_a_repeated_validation_right_before_a_stop_is_logged_once(
    tmp_path: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step and so no checkpoint follows it before the stop."""
    made = recipe("gpt", **INTERVALS)
    runner(tmp_path / "uninterrupted", made)
    inner, moments = validate.evaluate_losses, iter(["before", "after", "after"])

    def interrupted(*args: Any) -> dict[str, float]:
        moment = next(moments, None)
        if moment == "before":
            signal.raise_signal(signal.SIGTERM)
        results = inner(*args)
        if moment == "after":
            signal.raise_signal(signal.SIGTERM)
        return results

    monkeypatch.setattr(validate, "evaluate_losses", interrupted)
    summaries = [run(tmp_path / "stopped", made, resume=True) for _ in range(4)]
    assert [summary.step for summary in summaries] == [7, 7, 7, 24]
    assert [event["step"] for event in events(tmp_path / "stopped", "validation")] == [7, 14, 21, 24]
    assert_equal_runs(tmp_path / "uninterrupted", tmp_path / "stopped")


def test_patience_counts_over_a_resume(tmp_path: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops after one, and after two validations without improvement, leave one more to patience=3."""
    made = recipe("gpt", steps=100, validate_every=2, patience=3)
    values: list[float] = []
    monkeypatch.setattr(validate, "evaluate_losses", lambda *_: {"loss": values.pop(0)})
    for out, stops in (("uninterrupted", ()), ("stopped", (6, 7, 9))):
        values[:] = [5.0, 4.0, 4.5, 4.2, 4.1, 4.05, 4.01, 4.005]
        for stop in stops:
            runner(tmp_path / out, made, stop)
        summary = run(tmp_path / out, made, resume=True)
        assert (summary.step, summary.best, summary.stopped) == (10, 4.0, False)
        assert events(tmp_path / out)[-1]["reason"] == "loss has not improved for 3 validations"
    assert_equal_runs(tmp_path / "uninterrupted", tmp_path / "stopped")


def test_more_steps_on_resume_equal_one_longer_run(tmp_path: Path, runner: Runner) -> None:
    for steps, out in ((12, "twice"), (18, "twice"), (18, "once")):
        runner(tmp_path / out, recipe("bert", steps=steps, schedule="constant", save_every=4, average_checkpoints=2))
    assert [e["loss"] for e in events(tmp_path / "twice", "step")] == losses(tmp_path / "once")
    assert distance(tensors(tmp_path / "twice"), tensors(tmp_path / "once")) == 0
    assert [event["step"] for event in events(tmp_path / "twice", "validation")] == [12, 18, 18]
    assert [event["step"] for event in events(tmp_path / "once", "validation")] == [18, 18], (
        "the second is that of the averaged weights"
    )
    assert load_recipe(str(tmp_path / "twice" / "recipe.yaml")).train.steps == 18
    assert [(e["step"], e["steps"]) for e in events(tmp_path / "twice", "start")] == [(0, 12), (12, 18)]


def test_no_step_is_logged_twice_after_a_crash(tmp_path: Path, runner: Runner) -> None:
    """After a crash between two checkpoints, run and log go back to the last one."""
    made = recipe("gpt", **(INTERVALS | {"log_every": 1, "save_every": 10}))
    for crash in (3, 17):  # before any checkpoint, and after one
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "crashed", made, resume=True, on_event=lambda event: 1 / (event["step"] - crash))  # noqa: B023
    runner(tmp_path / "crashed", made)
    assert [event["step"] for event in events(tmp_path / "crashed", "step")] == list(range(1, STEPS + 1))
    runner(tmp_path / "uninterrupted", made)
    assert_equal_runs(tmp_path / "uninterrupted", tmp_path / "crashed")


def test_a_run_killed_in_its_first_save_starts_again(tmp_path: Path, runner: Runner) -> None:
    (tmp_path / "out" / "checkpoints" / ".step-00000004.tmp-999999999").mkdir(parents=True)
    (tmp_path / "out" / "log.jsonl").write_text('{"kind": "start", "step": 0}\n{"kind": "step", "step": 1}\n')
    made = recipe("gpt", **INTERVALS)
    runner(tmp_path / "out", made)
    runner(tmp_path / "uninterrupted", made)
    assert_equal_runs(tmp_path / "uninterrupted", tmp_path / "out")
    assert not list((tmp_path / "out" / "checkpoints").glob(".*"))


def test_a_run_killed_before_its_last_model_still_gets_it(tmp_path: Path, runner: Runner) -> None:
    made = recipe("gpt", **INTERVALS, average_checkpoints=2)
    runner(tmp_path / "uninterrupted", made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "save_model_folder", lambda run, name: 1 / (name != "last"))
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "killed", made)
    assert not (tmp_path / "killed" / "last").exists()
    runner(tmp_path / "killed", made)
    assert log(tmp_path / "killed") == log(tmp_path / "uninterrupted")
    last = [load_model(tmp_path / name / "last").network.state_dict() for name in ("killed", "uninterrupted")]
    assert distance(last[0], last[1]) == 0
    with pytest.raises(UserError, match=r"train\.steps: 24 is the total, and .*killed is at 24; raise it"):
        run(tmp_path / "killed", made, resume=True)


@pytest.mark.parametrize("damage", ["cut", "bit", "gone", "manifest"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(damage: str, tmp_path: Path, runner: Runner) -> None:
    made = recipe("gpt", **INTERVALS)
    runner(tmp_path / "uninterrupted", made)
    runner(tmp_path / "out", made, 10)
    folder = tmp_path / "out" / "checkpoints" / "step-00000010"
    file = folder / ("manifest.json" if damage == "manifest" else "optimizer.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    messages = runner(tmp_path / "out", made)
    warning = next(line for line in messages if line.startswith(str(file if damage != "manifest" else folder)))
    assert warning.endswith("; trying the previous checkpoint")
    assert "resuming from step 8 of 24" in messages
    assert_equal_runs(tmp_path / "uninterrupted", tmp_path / "out")


def test_a_run_without_an_intact_checkpoint_is_refused(tmp_path: Path, runner: Runner) -> None:
    made = recipe("gpt", **INTERVALS)
    runner(tmp_path / "out", made, 2)
    (tmp_path / "out" / "checkpoints" / "step-00000002" / "weights.safetensors").write_bytes(b"")
    before = (tmp_path / "out" / "log.jsonl").read_bytes()
    with pytest.raises(UserError, match="no checkpoint is intact; start again in another folder"):
        run(tmp_path / "out", made, resume=True)
    assert (tmp_path / "out" / "log.jsonl").read_bytes() == before


def test_settings_that_do_not_change_the_result_may_change_on_resume(tmp_path: Path, runner: Runner) -> None:
    runner(tmp_path / "uninterrupted", recipe("gpt", **INTERVALS))
    runner(tmp_path / "out", recipe("gpt", **INTERVALS), 9)
    other = INTERVALS | {"save_every": 3, "keep_checkpoints": 1, "activation_checkpointing": True}
    runner(tmp_path / "out", recipe("gpt", "data.workers=2", **other))
    assert distance(tensors(tmp_path / "out"), tensors(tmp_path / "uninterrupted")) == 0
    assert len(list((tmp_path / "out" / "checkpoints").iterdir())) == 1


def test_fp16_resumes_with_its_loss_scale(tmp_path: Path, runner: Runner) -> None:
    made = recipe("gpt", **INTERVALS, precision="fp16")
    seen: list[tuple[float, int]] = []
    close = loop.close

    def recorded(run: RunState) -> None:
        assert run.updater.scaler is not None
        seen.append((run.updater.scaler.scale, run.updater.scaler.steps))
        close(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "close", recorded)
        runner(tmp_path / "uninterrupted", made)
        runner(tmp_path / "out", made, 9)
        runner(tmp_path / "out", made)
    assert seen[0] == seen[2] == (2.0**16, STEPS)
    assert seen[1] == (2.0**16, 9)
    assert_equal_runs(tmp_path / "uninterrupted", tmp_path / "out")


def test_more_micro_batches_after_out_of_memory_persist_on_resume(
    tmp_path: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout is drawn per micro-batch: going back to full batches would change the run."""
    made = recipe("gpt", **INTERVALS)
    runner(tmp_path / "uninterrupted", recipe("gpt", **INTERVALS, grad_accum=2))
    forward, failed = torch.nn.Module.__call__, []

    def once(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if type(module).__name__ == "Objective" and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError
        return forward(module, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "__call__", once)
        runner(tmp_path / "out", made, 9)
    runner(tmp_path / "out", made)
    assert distance(tensors(tmp_path / "out"), tensors(tmp_path / "uninterrupted")) == 0
