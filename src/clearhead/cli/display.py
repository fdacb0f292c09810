"""What `clearhead train` shows while it runs: best effort, since training must not depend on who reads it."""

import contextlib
import io
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, Self, TextIO

from clearhead.cli.language import localized

METRICS = (
    "loss",
    "perplexity",
    "accuracy",
    "bleu",
    "chrf",
    "f1",
    "exact",
    "matthews",
    "pearson",
    "spearman",
    "exposure_bias",
)
QUEUE_SIZE = 1000  # pieces of text that wait for a slow reader; more are dropped
END_SECONDS = 2.0  # that the last lines wait for it


class BackgroundStream(io.TextIOBase):
    """A text stream that neither fails nor blocks: a thread writes, and what cannot be written is dropped."""

    def __init__(self, stream: TextIO | None):
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._stream, self._descriptor = stream, _descriptor(stream)
        self._queue: queue.Queue[str | None] = queue.Queue(QUEUE_SIZE)
        # A daemon: a reader that has stopped reading does not keep the process alive.
        self._thread = threading.Thread(target=self._write_queue, name="clearhead-display", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream that is written to."""
        return self._encoding

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._descriptor is not None and os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Text can always be written."""
        return True

    def write(self, text: str) -> int:
        """Queue a text, or drop it if the reader is far behind."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(text)
        return len(text)

    def close(self) -> None:
        """Wait a moment until everything is written."""
        if not self.closed:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=END_SECONDS)
                self._thread.join(END_SECONDS)
            if self._descriptor is not None and not self._thread.is_alive():
                os.close(self._descriptor)
                self._descriptor = None
        super().close()

    def _write_queue(self) -> None:
        while (text := self._queue.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # no reader, no space, or closed
                self._write_now(text)

    def _write_now(self, text: str) -> None:
        if self._descriptor is not None:  # not through `stream`, whose lock a blocked thread would hold at exit
            data = text.encode(self._encoding, "replace")
            while data:
                data = data[os.write(self._descriptor, data) :]
        elif self._stream is not None:
            self._stream.write(text)
            self._stream.flush()


def _descriptor(stream: TextIO | None) -> int | None:
    """Return a descriptor of our own: while a tokenizer loads, that of stderr points to /dev/null."""
    try:
        return None if stream is None else os.dup(stream.fileno())
    except (OSError, ValueError):  # a stream in memory, or closed
        return None


class Display:
    """A progress bar on a terminal, plain lines in a pipe; without `steps`, lines only.

    Everything that is written to sys.stderr meanwhile, warnings too, neither fails nor blocks.
    """

    def __init__(self, steps: int = 0):
        from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

        from clearhead.cli.console import Console

        self.stream = BackgroundStream(sys.stderr)
        self.redirect = contextlib.redirect_stderr(self.stream)
        self.console = Console(file=self.stream)  # type: ignore[arg-type]  # text only
        self.steps = steps
        self.bar: Progress | None = None
        self.task = TaskID(0)
        if steps and self.console.is_terminal:
            count, text = TextColumn("{task.completed:,.0f}/{task.total:,.0f}"), TextColumn("{task.description}")
            self.bar = Progress(count, BarColumn(None), text, TimeRemainingColumn(), console=self.console)
            self.task = self.bar.add_task("", total=steps)

    def __enter__(self) -> Self:
        self.redirect.__enter__()
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()
        self.redirect.__exit__(None, None, None)
        self.stream.close()

    def end(self, line: str) -> None:
        """Stop the progress bar and print a line below it."""
        if self.bar:
            self.bar.stop()
        self.log(line)

    def log(self, line: str) -> None:
        """Print a line, in the language of the user."""
        self.console.print(localized(line), soft_wrap=True)

    def on_event(self, event: dict[str, Any]) -> None:
        """Show an event of the run log."""
        handlers: dict[str, Callable[[dict[str, Any]], None]] = {"step": self._step, "validation": self._validation}
        if event["kind"] in handlers:
            handlers[event["kind"]](event)

    def _step(self, event: dict[str, Any]) -> None:
        peak = f" · {event['mfu']:.0%} of peak" if "mfu" in event else ""
        text = f"loss {event['loss']:.3f} · {event['tokens_per_second']:,.0f} tokens/s{peak}"
        if self.bar:
            self.bar.update(self.task, completed=event["step"], description=localized(text))
        else:
            self.log(f"step {event['step']:,}/{self.steps:,} · {text}")

    def _validation(self, event: dict[str, Any]) -> None:
        metrics = " · ".join(f"{name.replace('_', ' ')} {event[name]:.4g}" for name in METRICS if name in event)
        self.log(f"step {event['step']:,} validation · {metrics}")
        for sample in event["samples"][:1]:
            for name, text in sample.items():
                self.log(f"    {name:9} {' '.join(text.split())[:100]}")
