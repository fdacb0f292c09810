"""Ctrl-C at random moments: no traceback, no stale prompt, and the next answer equals an undisturbed one."""

import os
import signal
import sys
from pathlib import Path

import pytest

from clearhead import cli
from tests.cli.models import start

COUNT = int(os.environ.get("CLEARHEAD_CTRL_C", 6))  # of chat, of generate and of library calls each


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_the_answer_after_ctrl_c_equals_an_undisturbed_one(tmp_path: Path) -> None:
    child = start(tmp_path, COUNT, 11, module="tests.cli.interruptions")
    output, errors = child.communicate(timeout=60 + 20 * COUNT)
    assert (child.returncode, errors) == (0, b""), errors.decode()
    print(output.decode())
    assert sum(int(line.rpartition(" ")[2]) for line in output.decode().splitlines()) == 3 * COUNT


def test_a_program_that_calls_the_command_line_gets_its_ctrl_c_handler_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["clearhead", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
