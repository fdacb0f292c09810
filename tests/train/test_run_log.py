"""The log of a run: lines that survive a kill, a resume that forgets what came later, damage that is named."""

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
    with RunLog(run) as record:
        for step in steps:
            record.write("step", step, loss=1 / step)
            if step % 10 == 0:
                record.write("validation", step, loss=2 / step)


def without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "torch.utils.tensorboard":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_no_folder_is_made_before_the_first_line(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run") as record:
        record.rewind(0)
        assert not (tmp_path / "run").exists()
        record.write("start", recipe="copy")
    assert read_log(tmp_path / "run" / "log.jsonl") == [{"kind": "start", "recipe": "copy"}]


def test_a_line_is_there_for_others_as_soon_as_it_is_written(tmp_path: Path) -> None:
    record = RunLog(tmp_path)
    for step in (1, 2):
        record.write("note", step, text="é 中文 \u2028")
        assert len(read_log(record.path)) == step
    assert "中文" in record.path.read_text(encoding="utf-8"), "readable as it stands"
    record.close()


def test_numbers_that_are_none_are_null_and_every_line_is_strict_json(tmp_path: Path) -> None:
    with RunLog(tmp_path) as record:
        record.write("step", 1, loss=math.nan, norm=math.inf, inner=[{"a": -math.inf}], rate=0.5)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    line = json.loads(record.path.read_text(), parse_constant=refuse)
    assert line == {"kind": "step", "step": 1, "loss": None, "norm": None, "inner": [{"a": None}], "rate": 0.5}


@given(
    st.lists(
        st.dictionaries(st.text(st.characters(), min_size=1).filter(lambda key: key not in "kindstepself"), values)
    )
)
def test_what_is_written_is_what_is_read(lines: list[dict[str, Any]]) -> None:
    with TemporaryDirectory() as folder:
        with RunLog(Path(folder)) as record:
            record.write("start")
            for line in lines:
                record.write("note", 1, **line)
        record.rewind(1)  # writes all of it again
        found = read_log(record.path)[1:]
    expected = [{"kind": "note", "step": 1, **line} for line in lines]
    assert found == json.loads(json.dumps(expected), parse_constant=lambda _: None)


def test_a_resumed_log_equals_that_of_one_go(tmp_path: Path) -> None:
    fill(tmp_path / "whole", range(1, 41))
    fill(tmp_path / "broken", range(1, 34))
    RunLog(tmp_path / "broken").rewind(20)
    fill(tmp_path / "broken", range(21, 41))
    assert (tmp_path / "broken" / "log.jsonl").read_bytes() == (tmp_path / "whole" / "log.jsonl").read_bytes()


def test_rewinding_forgets_later_lines_and_the_end(tmp_path: Path) -> None:
    record = RunLog(tmp_path)
    record.write("start")
    record.write("step", 10, loss=1.0)
    record.write("step", 20, loss=1.0)
    record.write("end", seconds=3.0)
    record.rewind(20)
    assert [line["kind"] for line in read_log(record.path)] == ["start", "step", "step"]
    record.write("note", 25, text="of a later part")
    record.write("start", device="cpu")  # has no step, but came after step 25
    record.rewind(10)
    assert [line["kind"] for line in read_log(record.path)] == ["start", "step"]
    record.write("step", 20, loss=2.0)
    assert read_log(record.path)[-1]["loss"] == 2.0, "writing goes on in the new file"
    record.close()


def test_rewinding_leaves_the_log_whole_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, range(1, 30))
    before = (tmp_path / "log.jsonl").read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(UserError, match="No space left on device"):
        RunLog(tmp_path).rewind(5)
    assert (tmp_path / "log.jsonl").read_bytes() == before


def test_a_log_cut_anywhere_is_read_up_to_there_and_goes_on(tmp_path: Path) -> None:
    with RunLog(tmp_path / "whole") as record:
        for step in (1, 2, 3):
            record.write("note", step, text="日本")
    data = record.path.read_bytes()
    (tmp_path / "cut").mkdir()
    path = tmp_path / "cut" / "log.jsonl"
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        known = read_log(path)
        assert known == read_log(record.path)[: len(known)]
        assert len(known) in (data[:length].count(b"\n"), data[: length + 1].count(b"\n"))
        with RunLog(tmp_path / "cut") as again:
            again.write("end")
        assert read_log(path) == [*known, {"kind": "end"}]


@pytest.mark.parametrize(
    "damage", [b"{", b"", b"[1]", b'"kind"', b'{"step": 1}', b'{"kind": "a", "step": "b"}', b"\xff"]
)
def test_damage_is_named_by_its_line(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"kind": "start"}\n' + damage + b'\n{"kind": "end"}\n')
    with pytest.raises(UserError, match=r"log\.jsonl, line 2: damaged"):
        read_log(path)


def test_a_log_that_is_not_there_or_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"log\.jsonl cannot be read"):
        read_log(tmp_path / "log.jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"log\.jsonl cannot be written"):
        RunLog(tmp_path / "file").write("start")


def test_the_clock_of_a_resumed_run_is_added_up() -> None:
    assert elapsed([{"kind": "step", "seconds": seconds} for seconds in (1, 5, 9, 2, 6)]) == 9 + 6
    assert elapsed([{"kind": "start"}]) == 0


def test_series_hold_every_number_and_its_gaps() -> None:
    lines: list[dict[str, Any]] = [
        {"kind": "step", "step": 1, "loss": 2, "text": "no", "flag": [1]},
        {"kind": "step", "step": 2, "loss": None, "rate": math.nan},
        {"kind": "validation", "step": 2, "loss": 5},
        {"kind": "step", "loss": 7},
    ]
    assert series(lines, "step") == {"loss": [(1, 2), (2, None)], "rate": [(2, None)]}


def test_a_run_without_tensorboard_is_recorded_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_tensorboard(monkeypatch)
    fill(tmp_path, range(1, 3))
    assert len(read_log(tmp_path / "log.jsonl")) == 2
    assert not (tmp_path / "events").exists()


def test_tensorboard_shows_the_numbers_and_forgets_rewound_ones(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    fill(tmp_path, range(1, 34))
    with RunLog(tmp_path) as record:
        record.rewind(20)
        record.write("step", 21, loss=7.0, rate=math.nan, note="text")
    events = accumulator.EventAccumulator(str(tmp_path / "events")).Reload()
    assert set(events.Tags()["scalars"]) == {"training/loss", "validation/loss"}
    training = [(event.step, event.value) for event in events.Scalars("training/loss")]
    assert training == [(step, pytest.approx(1 / step)) for step in range(1, 21)] + [(21, 7.0)]
    assert [event.step for event in events.Scalars("validation/loss")] == [10, 20]
