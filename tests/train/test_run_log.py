"""The run log: lines survive a kill, a resume removes later lines, damage is reported."""

import builtins
import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import UserError
from clearhead.train.run_log import RunLog, elapsed, read_log, series

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
keys = st.text(st.characters(), min_size=1).filter(lambda key: key not in ("kind", "step", "self"))


def fill(run: Path, steps: range) -> None:
    with RunLog(run) as log:
        for step in steps:
            log.write("step", step, loss=1 / step)
            if step % 10 == 0:
                log.write("validation", step, loss=2 / step)


def without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "torch.utils.tensorboard":
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_no_folder_is_created_before_the_first_line(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run") as log:
        log.rewind(0)
        assert not (tmp_path / "run").exists()
        log.write("start", recipe="copy")
    assert read_log(tmp_path / "run" / "log.jsonl") == [{"kind": "start", "recipe": "copy"}]


def test_a_line_is_flushed_at_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in (1, 2):
        log.write("note", step, text="é 中文 \u2028")
        assert len(read_log(log.path)) == step
    assert "中文" in log.path.read_text(encoding="utf-8"), "not escaped"
    log.close()


def test_non_finite_numbers_are_null_and_every_line_is_strict_json(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write("step", 1, loss=math.nan, grad_norm=math.inf, inner=[{"a": -math.inf}], lr=0.5)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    line = json.loads(log.path.read_text(), parse_constant=refuse)
    assert line == {"kind": "step", "step": 1, "loss": None, "grad_norm": None, "inner": [{"a": None}], "lr": 0.5}


@given(
    st.lists(
        st.dictionaries(st.text(st.characters(), min_size=1).filter(lambda key: key not in "kindstepself"), values)
    )
)
def test_written_lines_round_trip(lines: list[dict[str, Any]]) -> None:
    with TemporaryDirectory() as folder:
        with RunLog(Path(folder)) as log:
            log.write("start")
            for line in lines:
                log.write("note", 1, **line)
        log.rewind(1)  # rewrites the file
        lines_read = read_log(log.path)[1:]
    expected = [{"kind": "note", "step": 1, **line} for line in lines]
    assert lines_read == json.loads(json.dumps(expected), parse_constant=lambda _: None)


def test_a_resumed_log_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    fill(tmp_path / "uninterrupted", range(1, 41))
    fill(tmp_path / "broken", range(1, 34))
    RunLog(tmp_path / "broken").rewind(20)
    fill(tmp_path / "broken", range(21, 41))
    assert (tmp_path / "broken" / "log.jsonl").read_bytes() == (tmp_path / "uninterrupted" / "log.jsonl").read_bytes()


def test_rewinding_removes_later_lines_and_the_end(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write("start")
    log.write("step", 10, loss=1.0)
    log.write("step", 20, loss=1.0)
    log.write("end", seconds=3.0)
    log.rewind(20)
    assert [line["kind"] for line in read_log(log.path)] == ["start", "step", "step"]
    log.write("note", 25, text="of a later step")
    log.write("start", device="cpu")  # has no step, but came after step 25
    log.rewind(10)
    assert [line["kind"] for line in read_log(log.path)] == ["start", "step"]
    log.write("step", 20, loss=2.0)
    assert read_log(log.path)[-1]["loss"] == 2.0, "later lines go to the new file"
    log.close()


def test_a_failed_rewind_leaves_the_log_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, range(1, 30))
    before = (tmp_path / "log.jsonl").read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(UserError, match="No space left on device"):
        RunLog(tmp_path).rewind(5)
    assert (tmp_path / "log.jsonl").read_bytes() == before


def test_a_truncated_log_is_read_up_to_there_and_continued(tmp_path: Path) -> None:
    with RunLog(tmp_path / "uninterrupted") as log:
        for step in (1, 2, 3):
            log.write("note", step, text="日本")
    data = log.path.read_bytes()
    (tmp_path / "cut").mkdir()
    path = tmp_path / "cut" / "log.jsonl"
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        known = read_log(path)
        assert known == read_log(log.path)[: len(known)]
        assert len(known) in (data[:length].count(b"\n"), data[: length + 1].count(b"\n"))
        with RunLog(tmp_path / "cut") as again:
            again.write("end")
        assert read_log(path) == [*known, {"kind": "end"}]


@pytest.mark.parametrize(
    "damage", [b"{", b"", b"[1]", b'"kind"', b'{"step": 1}', b'{"kind": "a", "step": "b"}', b"\xff"]
)
def test_damage_is_reported_with_its_line(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"kind": "start"}\n' + damage + b'\n{"kind": "end"}\n')
    with pytest.raises(UserError, match=r"log\.jsonl, line 2: damaged"):
        read_log(path)


def test_a_missing_or_unwritable_log_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"log\.jsonl cannot be read"):
        read_log(tmp_path / "log.jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"log\.jsonl cannot be written"):
        RunLog(tmp_path / "file").write("start")


def test_elapsed_adds_up_over_resumes() -> None:
    assert elapsed([{"kind": "step", "seconds": seconds} for seconds in (1, 5, 9, 2, 6)]) == 9 + 6
    assert elapsed([{"kind": "start"}]) == 0


def test_series_hold_every_number_and_its_gaps() -> None:
    lines: list[dict[str, Any]] = [
        {"kind": "step", "step": 1, "loss": 2, "text": "no", "flag": [1]},
        {"kind": "step", "step": 2, "loss": None, "lr": math.nan},
        {"kind": "validation", "step": 2, "loss": 5},
        {"kind": "step", "loss": 7},
    ]
    assert series(lines, "step") == {"loss": [(1, 2), (2, None)], "lr": [(2, None)]}


def test_the_log_is_written_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_tensorboard(monkeypatch)
    fill(tmp_path, range(1, 3))
    assert len(read_log(tmp_path / "log.jsonl")) == 2
    assert not (tmp_path / "events").exists()


def test_tensorboard_has_the_numbers_without_rewound_ones(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    fill(tmp_path, range(1, 34))
    with RunLog(tmp_path) as log:
        log.rewind(20)
        log.write("step", 21, loss=7.0, lr=math.nan, note="text")
    events = accumulator.EventAccumulator(str(tmp_path / "events")).Reload()
    assert set(events.Tags()["scalars"]) == {"training/loss", "validation/loss"}
    training = [(event.step, event.value) for event in events.Scalars("training/loss")]
    assert training == [(step, pytest.approx(1 / step)) for step in range(1, 21)] + [(21, 7.0)]
    assert [event.step for event in events.Scalars("validation/loss")] == [10, 20]
