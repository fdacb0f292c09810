"""How training ends: stop signals, patience, non-finite gradients, out of memory, a full disk."""

import errno
import os
import resource
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file

from clearhead.checkpoint import disk, newest_checkpoint
from clearhead.config.train import TrainConfig
from clearhead.data import GlobalBatch
from clearhead.errors import UserError
from clearhead.train import loop, signals, validate
from clearhead.train.objective import Objective
from clearhead.train.signals import StopSignal
from clearhead.train.state import RunState
from clearhead.train.updater import Metrics, Updater
from tests.checkpoint.small_models import contents
from tests.checkpoint.test_crash import in_child
from tests.train.tiny import distance, events, losses, recipe, run, tensors

NO_DROPOUT = ("model.dropout=0", "model.attention_dropout=0")


def test_a_stop_before_the_first_step_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "global_batches", lambda run: signal.raise_signal(signal.SIGINT))
    summary = run(tmp_path / "out", recipe("gpt"))
    assert (summary.step, summary.stopped) == (0, True)
    assert not list(tmp_path.iterdir())


def test_a_second_signal_exits_at_once_but_repeated_signals_count_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    clock = iter([100.0, 100.01, 100.9, 101.5])
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with StopSignal() as stop:
        stop.finish_step = True
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stopped_run_leaves_a_complete_run_folder(tmp_path: Path) -> None:
    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 3:
            signal.raise_signal(signal.SIGTERM)

    summary = run(tmp_path, recipe("gpt", save_every=2, average_checkpoints=2), on_event=stop)
    assert (summary.step, summary.stopped) == (3, True)
    state, damaged = newest_checkpoint(tmp_path)
    assert state is not None
    assert (state.step, damaged) == (3, [])
    assert events(tmp_path)[-1] == {"kind": "end", "step": 3, "best": None, "reason": "stopped"}
    assert "stopped" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "last" / "model.safetensors").exists()
    assert not any("average" in event for event in events(tmp_path)), "only a finished run is averaged"


def test_patience_ends_a_run_that_does_not_improve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([5.0, 4.0, 4.0, 4.5, float("nan"), 3.0])
    monkeypatch.setattr(validate, "evaluate_losses", lambda *_: {"loss": next(values)})
    made = recipe("gpt", validate_every=2, patience=3, steps=100)
    summary = run(tmp_path, made)
    assert (summary.step, summary.best, summary.stopped) == (10, 4.0, False)
    assert events(tmp_path)[-1]["reason"] == "loss has not improved for 3 validations"
    assert newest_checkpoint(tmp_path)[0].step == 10  # type: ignore[union-attr]
    assert run(tmp_path, made, resume=True).step == 10, "resuming changes nothing: patience is still exhausted"
    assert next(values) == 3.0
    config = (tmp_path / "best" / "config.json").read_text()
    assert '"step": 4' in config


@pytest.mark.parametrize(
    ("metric", "scores", "best"),
    [("loss", [3.0, 2.0, 2.5], 2.0), ("bleu", [3.0, 4.0, 3.5], 4.0), ("loss", [float("nan"), float("inf"), 9.0], 9.0)],
)
def test_the_best_model_is_chosen_by_the_metric(
    metric: str, scores: list[float], best: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = iter(scores)
    monkeypatch.setattr(validate, "evaluate_losses", lambda *_: {"loss": 1.0} | {metric: next(values)})
    monkeypatch.setattr(validate, "evaluate_outputs", lambda *_: ({}, []))
    summary = run(tmp_path, recipe("translator", steps=3, validate_every=1, save_every=1, metric=metric))
    assert summary.best == best
    assert f'"step": {scores.index(best) + 1}' in (tmp_path / "best" / "config.json").read_text()


@pytest.mark.parametrize("metric", get_args(TrainConfig.model_fields["metric"].annotation))
def test_only_a_strictly_better_finite_metric_is_an_improvement(metric: str) -> None:
    better, worse = (0.4, 0.6) if metric == "loss" else (0.6, 0.4)
    assert validate.better(metric, better, worse)
    assert not validate.better(metric, worse, better)
    assert not validate.better(metric, 0.5, 0.5), "equal is not better"
    assert validate.better(metric, 0.5, None)
    assert not validate.better(metric, float("nan"), None)
    assert not validate.better(metric, float("inf"), None)


@pytest.mark.parametrize(("metric", "sign"), [("loss", 1), ("bleu", -1)])
def test_an_equal_metric_neither_resets_patience_nor_replaces_the_best_model(
    metric: str, sign: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = iter([5.0, 4.0, 4.0, 4.0, 3.0])
    monkeypatch.setattr(validate, "evaluate_losses", lambda *_: {"loss": 1.0} | {metric: sign * next(values)})
    monkeypatch.setattr(validate, "evaluate_outputs", lambda *_: ({}, []))
    summary = run(tmp_path, recipe("translator", validate_every=1, patience=2, metric=metric))
    assert (summary.step, summary.best) == (4, sign * 4.0)
    assert '"step": 2' in (tmp_path / "best" / "config.json").read_text()


class NonFiniteGradients:
    """Make the gradients of some steps not finite, before clipping."""

    def __init__(self, steps: set[int], monkeypatch: pytest.MonkeyPatch, value: float = float("nan")):
        inner = Updater.set_lr  # the last call before the optimizer step that knows the step

        def broken(updater: Updater, step: int) -> None:
            if step in steps:
                next(p for p in updater.objective.parameters() if p.grad is not None).grad.view(-1)[0] = value
            inner(updater, step)

        monkeypatch.setattr(Updater, "set_lr", broken)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip", ["1.0", "null"])
def test_a_non_finite_update_is_skipped(
    value: float, clip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NonFiniteGradients({1, 4, 5}, monkeypatch, value)
    messages: list[str] = []
    run(
        tmp_path,
        recipe("gpt", f"train.grad_clip={clip}", steps=6, save_every=1, keep_checkpoints=9),
        log=messages.append,
    )
    states = [tensors_at(tmp_path, step) for step in (3, 4, 5, 6)]
    assert distance(states[0], states[1]) == 0, "weights and moments are bit-identical"
    assert distance(states[1], states[2]) == 0
    assert distance(states[2], states[3]) > 0
    assert all(torch.isfinite(x).all() for x in states[-1].values())
    notes = [event["step"] for event in events(tmp_path, "note")]
    assert notes == [1, 4, 5]
    assert sum("this update was skipped" in line for line in messages) == 3


def test_a_non_finite_loss_stops_neither_a_save_nor_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Objective.forward

    def poisoned(objective: Objective, batch: Any, context: Any = None) -> Any:
        losses = inner(objective, batch, context)
        if context is None or context.step != 4:
            return losses
        return {n: loss._replace(total=loss.total / 0, unsmoothed=loss.unsmoothed / 0) for n, loss in losses.items()}

    def crash(event: dict[str, Any]) -> None:
        if (event["kind"], event["step"]) == ("step", 5) and crashes:
            crashes.pop()
            raise ZeroDivisionError

    monkeypatch.setattr(Objective, "forward", poisoned)
    crashes = [True]
    made = recipe("gpt", save_every=2, log_every=5)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, made, on_event=crash)
    run(tmp_path, made, resume=True)
    assert losses(tmp_path)[0] is None, "logged as null"
    assert losses(tmp_path)[1] > 0
    assert distance(tensors_at(tmp_path, 6), tensors_at(tmp_path, 8)) > 0


def tensors_at(out: Path, step: int) -> dict[str, torch.Tensor]:
    folder = out / "checkpoints" / f"step-{step:08}"
    return load_file(folder / "weights.safetensors") | load_file(folder / "optimizer.safetensors")


def test_three_non_finite_updates_in_a_row_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    NonFiniteGradients({2, 3, 5, 6, 7}, monkeypatch)
    seen: list[GlobalBatch] = []
    train_step = loop.train_step
    monkeypatch.setattr(loop, "train_step", lambda run, batch: (seen.append(batch), train_step(run, batch))[1])
    with pytest.raises(
        UserError, match="step 7: the gradient was not finite 3 times in a row; the batch is in"
    ) as info:
        run(tmp_path / "out", recipe("gpt", save_every=1))
    assert "lower train.lr" in str(info.value)
    saved = load_file(tmp_path / "out" / "nonfinite-step-7-rank-0.safetensors")
    batch = seen[-1].batches[0]
    assert saved.keys() == {f"0.{name}" for name in batch.tensors}
    assert torch.equal(saved["0.ids"], batch["ids"])
    monkeypatch.undo()
    assert run(tmp_path / "out", recipe("gpt", save_every=1), resume=True).step == 10, "it can resume"


def test_fp16_lowers_its_loss_scale_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    NonFiniteGradients({2, 3, 4, 5}, monkeypatch, float("inf"))
    runs: list[RunState] = []
    close = loop.close
    monkeypatch.setattr(loop, "close", lambda run: (runs.append(run), close(run))[1])
    run(tmp_path, recipe("gpt", precision="fp16", save_every=1, keep_checkpoints=10))
    assert runs[0].updater.scaler is not None
    assert runs[0].updater.scaler.scale == 2.0**12
    assert distance(tensors_at(tmp_path, 1), tensors_at(tmp_path, 5)) == 0
    assert distance(tensors_at(tmp_path, 5), tensors_at(tmp_path, 6)) > 0


class OutOfMemory:
    """Raise an out-of-memory error in some forward passes, counted from 1."""

    def __init__(self, failing: set[int], monkeypatch: pytest.MonkeyPatch):
        self.count = 0
        inner = Objective.forward

        def forward(objective: Objective, *args: Any) -> Any:
            self.count += 1
            if self.count in failing:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return inner(objective, *args)

        monkeypatch.setattr(Objective, "forward", forward)


@pytest.mark.parametrize("changes", [(), ("data.packed=true",)])
def test_out_of_memory_repeats_the_batch_in_more_micro_batches(
    changes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails in the first step (the full batch, then the second of two), so that all steps use four micro-batches."""
    settings: dict[str, Any] = {"precision": "fp64", "log_every": 5}
    run(tmp_path / "four", recipe("translator", *changes, **settings, grad_accum=4))
    run(tmp_path / "one", recipe("translator", *changes, *NO_DROPOUT[:1], **settings))
    with monkeypatch.context() as patch:
        OutOfMemory({1, 3}, patch)
        messages: list[str] = []
        run(tmp_path / "failing", recipe("translator", *changes, **settings), log=messages.append)
    assert [line for line in messages if "memory" in line] == [
        "out of memory: batches are now split into 2 micro-batches; the update is the same",
        "out of memory: batches are now split into 4 micro-batches; the update is the same",
    ]
    assert losses(tmp_path / "failing") == losses(tmp_path / "four"), "with the dropout of four micro-batches"
    assert distance(tensors(tmp_path / "failing"), tensors(tmp_path / "four")) == 0
    with monkeypatch.context() as patch:
        OutOfMemory({4, 6}, patch)
        run(tmp_path / "no dropout", recipe("translator", *changes, *NO_DROPOUT[:1], **settings))
    assert losses(tmp_path / "no dropout") == pytest.approx(losses(tmp_path / "one"), rel=1e-9), (
        "the log has every step"
    )
    assert distance(tensors(tmp_path / "no dropout"), tensors(tmp_path / "one")) < 1e-9
    assert [event["step"] for event in events(tmp_path / "no dropout", "note")] == [3, 3]


def test_out_of_memory_with_one_sample_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    OutOfMemory(set(range(100)), monkeypatch)
    with pytest.raises(UserError, match=r"out of memory with one sample; lower data\.max_length"):
        run(tmp_path / "out", recipe("gpt"))
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_an_error_and_the_run_can_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe("gpt", save_every=4, validate_every=5)
    run(tmp_path / "uninterrupted", made)
    write = disk.write_json

    def full(path: Path, data: Any) -> None:
        if path.name == "state.json" and data["step"] == 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_json", full)
        with pytest.raises(UserError, match=r"step-00000008/state\.json cannot be written \(No space left on device\)"):
            run(tmp_path / "out", made)
    state, damaged = newest_checkpoint(tmp_path / "out")
    assert state is not None
    assert (state.step, damaged) == (4, [])
    run(tmp_path / "out", made, resume=True)
    assert losses(tmp_path / "out") == losses(tmp_path / "uninterrupted")
    assert distance(tensors(tmp_path / "out"), tensors(tmp_path / "uninterrupted")) == 0


def test_a_file_size_limit_ends_the_run_with_the_file_name(tmp_path: Path) -> None:
    """Enforced by the system, for weights, log or model."""

    def limited(size: int, name: str) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with pytest.raises(UserError, match=rf"{name} cannot be written \(File too large\)"):
            run(tmp_path / str(size), recipe("gpt", save_every=2))

    run(tmp_path / "cache", recipe("gpt", steps=1))
    for size, name in ((10, "log.jsonl|recipe.yaml"), (10_000, r"weights\.safetensors")):
        assert in_child(lambda: limited(size, name)) == 0  # noqa: B023


def test_a_read_only_run_folder_is_an_error(tmp_path: Path) -> None:
    disk_folder = tmp_path / "disk"
    disk_folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk_folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        run(disk_folder / "out", recipe("gpt", steps=4))
        subprocess.run(["mount", "-o", "remount,ro", str(disk_folder)], check=True)
        before = contents(disk_folder)
        with pytest.raises(UserError, match=r"\.lock cannot be written \(Read-only file system\)"):
            run(disk_folder / "out", recipe("gpt", steps=8, schedule="cosine"), resume=True)
        with pytest.raises(UserError, match=r"cannot be written \(Read-only file system\)"):
            run(disk_folder / "new", recipe("gpt", steps=4))
        assert contents(disk_folder) == before
    finally:
        subprocess.run(["umount", str(disk_folder)], check=True)


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    made = recipe("gpt", save_every=2)
    errors: list[str] = []

    def second(event: dict[str, Any]) -> None:
        if event["step"] == 5 and event["kind"] == "step":
            with pytest.raises(UserError) as info:
                run(tmp_path, made, resume=True)
            errors.append(str(info.value))

    assert run(tmp_path, made, on_event=second).step == 10
    assert f"process {os.getpid()} is training here" in errors[0]


def test_metrics_are_averaged_between_log_lines(tmp_path: Path) -> None:
    run(tmp_path / "one", recipe("gpt", *NO_DROPOUT, "data.batch_tokens=96", steps=6))
    run(tmp_path / "three", recipe("gpt", *NO_DROPOUT, "data.batch_tokens=96", steps=6, log_every=3))
    every, third = losses(tmp_path / "one"), losses(tmp_path / "three")
    assert third == pytest.approx([sum(every[:3]) / 3, sum(every[3:]) / 3], rel=1e-6), "all batches have the same size"
    assert Metrics().sums == {}
