"""Stopping when asked: SIGTERM and Ctrl-C let the step finish, save and leave; a second time, they end it at once."""

import signal
import threading
from types import FrameType
from typing import Any, Self


class Stopper:
    """True once somebody asked to stop; the loop looks between steps."""

    def __init__(self) -> None:
        self.signal = 0
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
        at_once = self.signal or not self.patient
        self.signal = number
        if at_once:
            raise KeyboardInterrupt
