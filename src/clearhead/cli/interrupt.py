"""Ctrl-C: KeyboardInterrupt, also where a library turns it into another error."""

import os
import signal
import sys
from types import FrameType

received = False  # and not handled: an error that comes now comes from Ctrl-C


def install() -> None:
    """Handle SIGINT, unless it is ignored."""
    global received
    received = False
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL):
        signal.signal(signal.SIGINT, _interrupt)


def uninstall() -> None:
    """End at once from now on: Python prints a traceback for Ctrl-C while it shuts down."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def handled() -> None:
    """Go on after Ctrl-C."""
    global received
    received = False


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or exit at once while torch is being imported, which can swallow the exception."""
    global received
    received = True
    if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
        os._exit(130)  # nothing has been read or written yet
    raise KeyboardInterrupt
