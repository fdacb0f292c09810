"""How training ends: asked to, out of patience, with gradients that are not finite, without memory, on a full disk."""

import errno
import os
import resource
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clearhead.checkpoint import disk, newest_state
from clearhead.data import GlobalBatch
from clearhead.errors import UserError
from clearhead.train import signals as stop
from clearhead.train import validate
from clearhead.train.objective import Objective
from clearhead.train.run import Run
from clearhead.train.signals import Stopper
from clearhead.train.updater import Progress, Updater
from tests.checkpoint.small import contents
from tests.checkpoint.test_crash import in_child
from tests.train.tiny import distance, events, losses, recipe, run, tensors

STILL = ("model.dropout=0", "model.attention_dropout=0")


def test_asked_to_stop_before_the_first_step_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "items", lambda run: signal.raise_signal(signal.SIGINT))
    summary = run(tmp_path / "out", recipe("gpt"))
    assert (summary.step, summary.stopped) == (0, True)
    assert not list(tmp_path.iterdir())


def test_asked_twice_it_ends_at_once_but_one_request_may_come_as_two_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    clock = iter([100.0, 100.01, 100.9, 101.5])
    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with Stopper() as stopper:
        stopper.patient = True
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert stopper
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stopped_run_leaves_a_whole_run_folder(tmp_path: Path) -> None:
    def ask(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 3:
            signal.raise_signal(signal.SIGTERM)

    summary = run(tmp_path, recipe("gpt", save_every=2, average_checkpoints=2), watch=ask)
    assert (summary.step, summary.stopped) == (3, True)
    state, refused = newest_state(tmp_path)
    assert state is not None
    assert (state.step, refused) == (3, [])
    assert events(tmp_path)[-1] == {"kind": "end", "step": 3, "best": None, "reason": "stopped"}
    assert "stopped" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "last" / "model.safetensors").exists()
    assert not any("average" in event for event in events(tmp_path)), "the mean is for the end"


def test_patience_ends_a_run_that_gets_no_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([5.0, 4.0, 4.0, 4.5, float("nan"), 3.0])
    monkeypatch.setattr(validate, "losses", lambda *_: {"loss": next(values)})
    made = recipe("gpt", validate_every=2, patience=3, steps=100)
    summary = run(tmp_path, made)
    assert (summary.step, summary.best, summary.stopped) == (10, 4.0, False)
    assert events(tmp_path)[-1]["reason"] == "no better loss for 3 validations"
    assert newest_state(tmp_path)[0].step == 10  # type: ignore[union-attr]
    assert run(tmp_path, made, resume=True).step == 10, "going on changes nothing: patience is still at its end"
    assert next(values) == 3.0
    config = (tmp_path / "best" / "config.json").read_text()
    assert '"step": 4' in config


@pytest.mark.parametrize(
    ("metric", "scores", "best"),
    [("loss", [3.0, 2.0, 2.5], 2.0), ("bleu", [3.0, 4.0, 3.5], 4.0), ("loss", [float("nan"), float("inf"), 9.0], 9.0)],
)
def test_the_best_is_what_the_metric_says(
    metric: str, scores: list[float], best: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = iter(scores)
    monkeypatch.setattr(validate, "losses", lambda *_: {"loss": 1.0} | {metric: next(given)})
    monkeypatch.setattr(validate, "scores", lambda *_: ({}, []))
    summary = run(tmp_path, recipe("translator", steps=3, validate_every=1, save_every=1, metric=metric))
    assert summary.best == best
    assert f'"step": {scores.index(best) + 1}' in (tmp_path / "best" / "config.json").read_text()


class Faults:
    """Makes the gradient of chosen updates not finite, before they are clipped."""

    def __init__(self, steps: set[int], monkeypatch: pytest.MonkeyPatch, value: float = float("nan")):
        inner = Updater.set_lr  # the last thing before the step that knows its number

        def broken(updater: Updater, step: int) -> None:
            if step in steps:
                next(p for p in updater.objective.parameters() if p.grad is not None).grad.view(-1)[0] = value
            inner(updater, step)

        monkeypatch.setattr(Updater, "set_rate", broken)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip", ["1.0", "null"])
def test_an_update_that_is_not_finite_is_left_out(
    value: float, clip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Faults({1, 4, 5}, monkeypatch, value)
    said: list[str] = []
    run(tmp_path, recipe("gpt", f"train.grad_clip={clip}", steps=6, save_every=1, keep_checkpoints=9), say=said.append)
    states = [tensors_at(tmp_path, step) for step in (3, 4, 5, 6)]
    assert distance(states[0], states[1]) == 0, "weights and moments to the bit"
    assert distance(states[1], states[2]) == 0
    assert distance(states[2], states[3]) > 0
    assert all(torch.isfinite(x).all() for x in states[-1].values())
    notes = [event["step"] for event in events(tmp_path, "note")]
    assert notes == [1, 4, 5]
    assert sum("this update was left out" in line for line in said) == 3


def test_a_loss_that_is_not_finite_neither_stops_a_save_nor_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Objective.forward

    def poisoned(objective: Objective, batch: Any, draws: Any = None) -> Any:
        found = inner(objective, batch, draws)
        bad = draws is not None and draws.step == 4
        return (
            {name: loss._replace(total=loss.total / 0, plain=loss.unsmoothed / 0) for name, loss in found.items()}
            if bad
            else found
        )

    def crash(event: dict[str, Any]) -> None:
        if (event["kind"], event["step"]) == ("step", 5) and stops:
            stops.pop()
            raise ZeroDivisionError

    monkeypatch.setattr(Objective, "forward", poisoned)
    stops = [True]
    made = recipe("gpt", save_every=2, log_every=5)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, made, watch=crash)
    run(tmp_path, made, resume=True)
    assert losses(tmp_path)[0] is None, "the log says so"
    assert losses(tmp_path)[1] > 0
    assert distance(tensors_at(tmp_path, 6), tensors_at(tmp_path, 8)) > 0


def tensors_at(out: Path, step: int) -> dict[str, torch.Tensor]:
    folder = out / "checkpoints" / f"step-{step:08}"
    return load_file(folder / "weights.safetensors") | load_file(folder / "optimizer.safetensors")


def test_three_updates_in_a_row_that_are_not_finite_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Faults({2, 3, 5, 6, 7}, monkeypatch)
    seen: list[GlobalBatch] = []
    learn = Run.learn
    monkeypatch.setattr(Run, "learn", lambda run, item: (seen.append(item), learn(run, item))[1])
    with pytest.raises(
        UserError, match="step 7: the gradient was not finite 3 times in a row; the batch is in"
    ) as info:
        run(tmp_path / "out", recipe("gpt", save_every=1))
    assert "lower train.lr" in str(info.value)
    saved = load_file(tmp_path / "out" / "broken-step-7-rank-0.safetensors")
    batch = seen[-1].batches[0]
    assert saved.keys() == {f"0.{name}" for name in batch.tensors}
    assert torch.equal(saved["0.ids"], batch["ids"])
    monkeypatch.undo()
    assert run(tmp_path / "out", recipe("gpt", save_every=1), resume=True).step == 10, "and it can go on"


def test_fp16_lowers_its_scale_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Faults({2, 3, 4, 5}, monkeypatch, float("inf"))
    runs: list[Run] = []
    close = Run.close
    monkeypatch.setattr(Run, "close", lambda run: (runs.append(run), close(run))[1])
    run(tmp_path, recipe("gpt", precision="fp16", save_every=1, keep_checkpoints=10))
    assert runs[0].updater.scaler is not None
    assert runs[0].updater.scaler.scale == 2.0**12
    assert distance(tensors_at(tmp_path, 1), tensors_at(tmp_path, 5)) == 0
    assert distance(tensors_at(tmp_path, 5), tensors_at(tmp_path, 6)) > 0


class EncoderOutput:
    """Lets the pass of some batch fail as on a GPU without memory: the n-th of all passes."""

    def __init__(self, failing: set[int], monkeypatch: pytest.MonkeyPatch):
        self.passes = 0
        inner = Objective.forward

        def forward(objective: Objective, *given: Any) -> Any:
            self.passes += 1
            if self.passes in failing:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return inner(objective, *given)

        monkeypatch.setattr(Objective, "forward", forward)


@pytest.mark.parametrize("changes", [(), ("data.packed=true",)])
def test_without_memory_the_same_batch_comes_in_smaller_parts(
    changes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step (whole, then two parts of which the second fails), so that all is done in four parts."""
    settings: dict[str, Any] = {"precision": "fp64", "log_every": 5}
    run(tmp_path / "four", recipe("translator", *changes, **settings, grad_accum=4))
    run(tmp_path / "one", recipe("translator", *changes, *STILL[:1], **settings))
    with monkeypatch.context() as patch:
        EncoderOutput({1, 3}, patch)
        said: list[str] = []
        run(tmp_path / "failing", recipe("translator", *changes, **settings), say=said.append)
    assert [line for line in said if "encoder_output" in line] == [
        "out of memory: batches now come in 2 parts, which add up to the same update",
        "out of memory: batches now come in 4 parts, which add up to the same update",
    ]
    assert losses(tmp_path / "failing") == losses(tmp_path / "four"), "with the dropout of four parts"
    assert distance(tensors(tmp_path / "failing"), tensors(tmp_path / "four")) == 0
    with monkeypatch.context() as patch:
        EncoderOutput({4, 6}, patch)
        run(tmp_path / "still", recipe("translator", *changes, *STILL[:1], **settings))
    assert losses(tmp_path / "still") == pytest.approx(losses(tmp_path / "one"), rel=1e-9), "no step is lost in the log"
    assert distance(tensors(tmp_path / "still"), tensors(tmp_path / "one")) < 1e-9
    assert [event["step"] for event in events(tmp_path / "still", "note")] == [3, 3]


def test_a_single_sample_that_does_not_fit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    EncoderOutput(set(range(100)), monkeypatch)
    with pytest.raises(UserError, match=r"out of memory with one sample; lower data\.longest"):
        run(tmp_path / "out", recipe("gpt"))
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_named_and_the_run_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe("gpt", save_every=4, validate_every=5)
    run(tmp_path / "whole", made)
    write = disk.write_json

    def full(path: Path, data: Any) -> None:
        if path.name == "state.json" and data["step"] == 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_json", full)
        with pytest.raises(UserError, match=r"step-00000008/state\.json cannot be written \(No space left on device\)"):
            run(tmp_path / "out", made)
    state, refused = newest_state(tmp_path / "out")
    assert state is not None
    assert (state.step, refused) == (4, [])
    run(tmp_path / "out", made, resume=True)
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    assert distance(tensors(tmp_path / "out"), tensors(tmp_path / "whole")) == 0


def test_a_file_that_may_not_grow_ends_the_run_with_its_name(tmp_path: Path) -> None:
    """By the system itself, whichever file it is: weights, log, model."""

    def limited(size: int, name: str) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with pytest.raises(UserError, match=rf"{name} cannot be written \(File too large\)"):
            run(tmp_path / str(size), recipe("gpt", save_every=2))

    run(tmp_path / "cache", recipe("gpt", steps=1))
    for size, name in ((10, "log.jsonl|recipe.yaml"), (10_000, r"weights\.safetensors")):
        assert in_child(lambda: limited(size, name)) == 0  # noqa: B023


def test_a_read_only_run_folder_is_named(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        run(place / "out", recipe("gpt", steps=4))
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        before = contents(place)
        with pytest.raises(UserError, match=r"\.lock cannot be written \(Read-only file system\)"):
            run(place / "out", recipe("gpt", steps=8, schedule="cosine"), resume=True)
        with pytest.raises(UserError, match=r"cannot be written \(Read-only file system\)"):
            run(place / "new", recipe("gpt", steps=4))
        assert contents(place) == before
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    made = recipe("gpt", save_every=2)
    complaints: list[str] = []

    def second(event: dict[str, Any]) -> None:
        if event["step"] == 5 and event["kind"] == "step":
            with pytest.raises(UserError) as info:
                run(tmp_path, made, resume=True)
            complaints.append(str(info.value))

    assert run(tmp_path, made, watch=second).step == 10
    assert f"process {os.getpid()} is training here" in complaints[0]


def test_progress_adds_up_over_the_steps_between_two_lines(tmp_path: Path) -> None:
    run(tmp_path / "one", recipe("gpt", *STILL, "data.batch_tokens=96", steps=6))
    run(tmp_path / "three", recipe("gpt", *STILL, "data.batch_tokens=96", steps=6, log_every=3))
    every, third = losses(tmp_path / "one"), losses(tmp_path / "three")
    assert third == pytest.approx([sum(every[:3]) / 3, sum(every[3:]) / 3], rel=1e-6), "windows have the same size"
    assert Progress().sums == {}
