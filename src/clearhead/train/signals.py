"""Graceful stop: Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 finish the step, save and exit; a second signal exits at once."""

import signal
import threading
import time
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # schedulers warn of the end with SIGUSR1
DEBOUNCE = 1.0  # seconds in which repeated signals count as one: `timeout` signals a process and its group


class Stopped(Exception):
    """A sweep ended by a signal, after its run was saved."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.signal = number


class StopSignal:
    """True once a stop was requested; the training loop checks it between steps."""

    def __init__(self) -> None:
        self.signal, self.requested_at = 0, 0.0
        self.finish_step = False  # False during setup, where there is nothing to save: exit at once
        self._previous_handlers: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signal != 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers in the main thread only
            for number in SIGNALS:
                # nohup ignores SIGHUP; None: not of Python, as faulthandler's
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        second = self.signal != 0 and now - self.requested_at > DEBOUNCE
        if not self.signal:
            self.signal, self.requested_at = number, now
        if second or not self.finish_step:
            raise KeyboardInterrupt
