"""Resuming a run that someone else sent: nothing in its folder is trusted, and nothing outside of it is touched."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clearhead.checkpoint import newest_checkpoint
from clearhead.errors import UserError
from clearhead.train.run_log import RunLog
from tests.checkpoint.small_models import contents
from tests.train.received_run import Campaign, reseal
from tests.train.tiny import events, recipe, run

MADE = recipe("gpt", steps=4, save_every=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "out"
    run(out, MADE)
    return out


@pytest.fixture
def received(trained: Path, tmp_path: Path) -> Path:
    """A copy of a run, beside a folder of the user's."""
    (tmp_path / "mine" / "step-00000004").mkdir(parents=True)
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    shutil.copytree(trained, tmp_path / "out")
    return tmp_path / "out"


def resume(out: Path) -> None:
    run(out, recipe("gpt", steps=6, save_every=2), resume=True)


def change_state(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the state.json of the newest checkpoint, with a manifest that fits."""
    folder = out / "checkpoints" / "step-00000004"
    state = json.loads((folder / "state.json").read_text())
    change(state)
    (folder / "state.json").write_text(json.dumps(state))
    reseal(folder)


HOSTILE: list[tuple[str, Any, str]] = [
    ("extra_checkpoint", "../../mine", "extra_checkpoint: '../../mine' is not a whole number"),
    ("extra_checkpoint", "step-00000002\n", "is not a whole number"),
    ("extra_checkpoint", 6, "extra_checkpoint: 6 is later than step 4"),
    ("position", [0, 0, -1], "position.2: -1 is too small"),
    ("position", [0, 0, 1.5], "position.2: 1.5 is not a whole number"),
    ("position", [0, 0], "position.2: missing"),
    ("position", {"a": 1}, "position"),
    ("metrics", {"kind": [1, 2, 3]}, "metrics: 'kind' is not a loss of this task"),
    ("metrics", {"lm": [1, 2]}, "metrics.lm.2: missing"),
    ("best", float("nan"), "best: nan is not a finite number"),
    ("grad_accum_factor", 1 << 19, "micro-batches, more than a batch has tokens"),
    ("grad_accum_factor", 1 << 80, "is too large"),
    ("scaler", [0.0, 1], "scaler.0: 0.0 is too small"),
    ("validations_since_best", True, "is not a whole number"),
    ("validation_pending", "no", "is neither true nor false"),
    ("recipe", [], "is not a group of settings"),
    ("recipe", {"train": {"lr": [[["x"] * 100_000]]}}, "train.lr: .*… is now 0.01"),
    ("recipe", {"a" * 1000 + str(n): n for n in range(1000)}, "and start another|999 more|more\\)"),
    ("vocabulary", "x" * 1000, "vocabulary: string should have at most 100"),
    ("stray", "../../mine", "stray: unknown setting"),
]


@pytest.mark.parametrize(("key", "value", "message"), HOSTILE)
def test_hostile_progress_is_refused(key: str, value: Any, message: str, received: Path) -> None:
    change_state(received, lambda state: state["progress"].update({key: value}))
    before = contents(received.parent)
    with pytest.raises(UserError, match=message) as info:
        resume(received)
    assert len(str(info.value)) < 10_000
    assert contents(received.parent) | {"out/.lock": b""} == before | {"out/.lock": b""}


def test_an_extra_checkpoint_is_a_step_so_only_checkpoints_are_deleted(received: Path) -> None:
    change_state(received, lambda state: state["progress"].update(extra_checkpoint=2))
    resume(received)
    assert sorted(path.name for path in (received / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]


def test_a_checkpoint_of_the_old_form_is_refused_in_words(received: Path) -> None:
    def old(state: dict[str, Any]) -> None:
        state["version"], state["numbers"] = 1, state.pop("progress")

    change_state(received, old)
    shutil.rmtree(received / "checkpoints" / "step-00000002")
    messages: list[str] = []
    with pytest.raises(UserError, match="no checkpoint is intact"):
        run(received, MADE, resume=True, log=messages.append)
    assert "format version 1, but this Clearhead resumes only 2; resume with the Clearhead that started" in messages[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(step="4"),
        lambda state: state.update(step=True),
        lambda state: state.update(other=1),
        lambda state: state.update(progress=None),
        lambda state: state.update(format="clearhead"),
    ],
)
def test_a_state_of_other_types_is_damage(change: Callable[[dict[str, Any]], object], received: Path) -> None:
    change_state(received, change)
    state, errors = newest_checkpoint(received)
    assert state is not None
    assert (state.step, len(errors)) == (2, 1)
    assert "state.json: " in errors[0]


def test_a_huge_state_is_not_read(received: Path) -> None:
    folder = received / "checkpoints" / "step-00000004"
    with (folder / "state.json").open("a") as file:
        file.write(" " * (1 << 24))
    reseal(folder)
    assert "larger than 16,777,216 bytes" in newest_checkpoint(received)[1][0]


LINKS = [".lock", "log.jsonl", "report.html", "events", "best", ".best.old", "checkpoints", "checkpoints/step-00000004"]
LINKS += ["checkpoints/step-00000006", "checkpoints/.step-00000006.old", "checkpoints/.step-00000006.tmp-1"]


@pytest.mark.parametrize("name", LINKS)
def test_a_link_in_a_run_folder_is_refused(name: str, received: Path) -> None:
    path, mine = received / name, received.parent / "mine"
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(mine / "notes.txt" if path.suffix or name == ".lock" else mine)
    before = contents(mine)
    with pytest.raises(UserError, match=f"{name} is a link; training writes only inside its run folder"):
        run(received, recipe("gpt", steps=6, save_every=2), resume=True)
    assert contents(mine) == before


@pytest.mark.parametrize("name", [".lock", "log.jsonl", "checkpoints/step-00000004/state.json"])
def test_a_fifo_in_a_run_folder_is_refused(name: str, received: Path) -> None:
    (received / name).unlink(missing_ok=True)
    os.mkfifo(received / name)
    with pytest.raises(UserError, match=f"{name} is neither a file nor a folder"):
        resume(received)


def test_a_run_folder_may_itself_be_a_link(received: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(received)
    resume(tmp_path / "link")
    assert newest_checkpoint(received)[0].step == 6  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", ["I32", "F32"])
def test_hostile_optimizer_tensors_are_refused(dtype: str, received: Path) -> None:
    folder = received / "checkpoints" / "step-00000004"
    path = folder / "optimizer.safetensors"
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    entry = header["exp_avg/decoder.norm.weight"]
    entry["dtype"], entry["shape"] = dtype, [1, *entry["shape"]] if dtype == "F32" else entry["shape"]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    reseal(folder)
    with pytest.raises(
        UserError, match=r"exp_avg/decoder\.norm\.weight (holds torch.int32|has shape \(1, 16\)) instead of"
    ):
        resume(received)


def test_a_deeply_nested_log_line_is_damage(received: Path) -> None:
    path = received / "log.jsonl"
    lines = path.read_text().splitlines()
    lines.insert(1, '{"kind": "note", "step": 1, "text": ' + "[" * 900 + "]" * 900 + "}")
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=r"log\.jsonl, line 2: damaged"):
        resume(received)


def test_failing_tensorboard_and_report_do_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def add_scalar(self, *_: Any) -> None:
            raise AttributeError("module 'tensorflow' has no attribute 'io'")

    def mirror(log: RunLog, *_: Any) -> None:
        with log._best_effort():
            Failing().add_scalar()

    monkeypatch.setattr(RunLog, "_mirror", mirror)
    (tmp_path / "out" / "report.html").mkdir(parents=True)  # cannot be replaced by a file
    (tmp_path / "out" / "checkpoints").mkdir()
    messages: list[str] = []
    summary = run(tmp_path / "out", MADE, resume=True, log=messages.append)
    assert not summary.stopped
    assert events(tmp_path / "out")[-1]["reason"] == "finished"
    assert any("report.html cannot be written" in line for line in messages)


def test_hostile_runs_give_only_user_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short campaign of `received_run.py`."""
    from clearhead.checkpoint import disk
    from clearhead.train import state

    monkeypatch.setattr(state, "prepare", state.prepare)  # the campaign replaces both
    monkeypatch.setattr(disk, "_sync", disk._sync)
    campaign = Campaign(tmp_path)
    for number in range(40):
        campaign.attempt(number)
    assert sum(campaign.counts.values()) >= 80
