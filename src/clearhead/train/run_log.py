"""The log of a run: one JSON object per line, and the same numbers for TensorBoard if it is installed.

    {"kind": "start", "recipe": "mini-en-de", "parameters": 4200000, "steps": 2000, …}
    {"kind": "step", "step": 10, "loss": 6.1, "accuracy": 0.1, "lr": 1e-4, "grad_norm": 1.2, …}
    {"kind": "validation", "step": 100, "loss": 5.2, "bleu": 3.1, "signature": {"bleu": "nrefs:1|…"}, "samples": […], …}
    {"kind": "note", "step": 120, "text": "the gradient is not finite; this update was skipped"}
    {"kind": "end", "step": 2000, "reason": "finished", …}

`seconds` counts from the start or the last resume. NaN and infinite numbers are null.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from clearhead.errors import UserError
from clearhead.files import write_text

log = logging.getLogger("clearhead")

Kind = Literal["start", "step", "validation", "note", "end"]
Line = dict[str, Any]
Points = list[tuple[float, float | None]]  # (step, value), None for a value that is not finite
Series = dict[str, Points]
NUMBERS = (int, float)
MAX_DEPTH = 20  # of nested lists and objects in a line


class RunLog:
    """Writes RUN/log.jsonl and RUN/events; neither is created before the first line."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.path = run / "log.jsonl"
        self._file: IO[str] | None = None
        self._events: Any = None  # a SummaryWriter, or False where TensorBoard is not installed or has failed
        self._purge_step: int | None = None  # TensorBoard drops older events from this step on

    def write(self, kind: Kind, step: int | None = None, **values: Any) -> None:
        """Append a line and flush it, so that a killed run loses none."""
        text = _text({"kind": kind} | ({} if step is None else {"step": step}) | values)
        try:
            if self._file is None:
                self._file = self._open()
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            raise UserError(f"{self.path} cannot be written ({error.strerror}); free some space, then resume") from None
        if step is not None and kind in ("step", "validation"):
            self._mirror("training" if kind == "step" else kind, step, values)

    def rewind(self, step: int, validation_pending: bool = False) -> None:
        """Remove the lines after a step, and the end, because the run resumes from there.

        With `validation_pending`, also remove the validation of that step: it is repeated.
        """
        self.close()
        self._purge_step = step + 1
        if not self.path.exists():
            return
        lines = read_log(self.path)
        later = (index for index, line in enumerate(lines) if line.get("step", 0) > step or "average" in line)
        kept = [line for line in lines[: next(later, len(lines))] if line["kind"] != "end"]
        if validation_pending:
            kept = [line for line in kept if line["kind"] != "validation" or line["step"] < step]
        kept = [line for line in kept if line["kind"] != "start" or line.get("step", 0) < step]  # logged again
        write_text(self.path, "".join(map(_text, kept)))

    def close(self) -> None:
        """Close the files; the next line opens them again."""
        if self._file is not None:
            self._file.close()
        if self._events:
            with self._best_effort():
                self._events.close()
        self._file = self._events = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> IO[str]:
        self.run.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.read_bytes()[-1:] not in (b"\n", b""):
            write_text(self.path, "".join(map(_text, read_log(self.path))))  # drop a truncated last line
        return self.path.open("a", encoding="utf-8", newline="")

    def _mirror(self, group: str, step: int, values: Line) -> None:
        if self._events is False:
            return
        with self._best_effort():
            if self._events is None:
                from torch.utils.tensorboard import SummaryWriter

                self._events = SummaryWriter(str(self.run / "events"), purge_step=self._purge_step)
            for name, value in values.items():
                if number(value) is not None:
                    self._events.add_scalar(f"{group}/{name}", value, step)
            if group == "validation":
                self._events.flush()

    @contextmanager
    def _best_effort(self) -> Iterator[None]:
        """Write no events after an error: TensorBoard is a copy, and nothing in it may stop a run."""
        try:
            yield
        except ImportError:
            self._events = False
        except Exception as error:
            self._events = False
            log.warning("%s: TensorBoard's events are no longer written (%s)", self.run / "events", error)


def read_log(path: Path) -> list[Line]:
    """Return the lines of a log. A truncated last line is left out; other damage is an error."""
    try:
        rows = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a run folder") from None
    lines: list[Line] = []
    for line_number, row in enumerate(rows, start=1):
        try:
            line = _plain(json.loads(row.decode()))
            if not isinstance(line["kind"], str) or not isinstance(line.get("step", 0), int):
                raise ValueError
        except (ValueError, LookupError, TypeError, RecursionError):
            if line_number == len(rows):  # empty after the last newline, or truncated
                break
            raise UserError(f"{path}, line {line_number}: damaged, not a log line; remove the line") from None
        lines.append(line)
    return lines


def number(value: Any) -> float | None:
    """Return a value as a float, or None if it is missing, not a number or not finite."""
    if isinstance(value, NUMBERS) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value)
    return None


def series(lines: Iterable[Line], kind: Kind) -> Series:
    """Return every number in the lines of a kind, by name."""
    points: Series = defaultdict(list)
    for line in lines:
        if line["kind"] == kind and (step := number(line.get("step"))) is not None:
            for name, value in line.items():
                if name != "step" and (value is None or isinstance(value, NUMBERS)):
                    points[name].append((step, number(value)))
    return points


def elapsed(lines: Iterable[Line]) -> float:
    """Return the total seconds of a run, whose clock restarts at every resume."""
    times = [seconds for line in lines if (seconds := number(line.get("seconds"))) is not None]
    return sum(before for before, after in pairwise(times) if after < before) + (times[-1] if times else 0.0)


def _text(line: Line) -> str:
    # UTF-8 cannot encode a lone surrogate; backslashreplace writes it as JSON does, \udc80.
    text = json.dumps(_plain(line), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode() + "\n"


def _plain(value: Any, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
