"""Stopping when asked: SIGTERM and Ctrl-C let the step finish, save and leave; a second later, they end it at once."""

import signal
import threading
import time
from types import FrameType
from typing import Any, Self

ONE = 1.0  # seconds within which several signals are one: `timeout` and schedulers send it to a process and its group


class Stopper:
    """True once somebody asked to stop; the loop looks between steps."""

    def __init__(self) -> None:
        self.signal, self.asked = 0, 0.0
        self.patient = False  # before training there is nothing to finish: stop at once
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signal != 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python lets nobody listen
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = self.signal != 0 and now - self.asked > ONE
        if not self.signal:
            self.signal, self.asked = number, now
        if again or not self.patient:
            raise KeyboardInterrupt
