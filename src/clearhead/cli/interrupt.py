"""Ctrl-C: KeyboardInterrupt, also where a library turns it into another error."""

import os
import signal
import sys
from types import FrameType
from typing import Any

received = False  # and not handled: an error that comes now comes from Ctrl-C
ending = False  # Python prints a traceback for KeyboardInterrupt while it shuts down
_before: Any = signal.default_int_handler  # the handler that `install` found


def install() -> None:
    """Handle SIGINT, unless it is ignored."""
    global received, ending, _before
    received = ending = False
    _before = signal.getsignal(signal.SIGINT)
    if _before in (signal.default_int_handler, signal.SIG_DFL):
        signal.signal(signal.SIGINT, _interrupt)


def restore() -> None:
    """Give SIGINT back to a program that called the command line."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, _before)


def handled() -> None:
    """Go on after Ctrl-C."""
    global received
    received = False


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or exit at once after the command and while torch, which can swallow it, is imported."""
    global received
    received = True
    if ending or getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
        os._exit(130)  # everything, or nothing yet, is written
    raise KeyboardInterrupt
