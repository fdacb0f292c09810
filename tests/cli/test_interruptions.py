"""Ctrl-C at random moments: no traceback, no stale prompt, and the next answer equals an undisturbed one."""

import os
import sys
from pathlib import Path

import pytest

from tests.cli.models import start

COUNT = int(os.environ.get("CLEARHEAD_CTRL_C", 6))  # of chat, of generate and of library calls each


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_the_answer_after_ctrl_c_equals_an_undisturbed_one(tmp_path: Path) -> None:
    child = start(tmp_path, COUNT, 11, module="tests.cli.interruptions")
    output, errors = child.communicate(timeout=60 + 20 * COUNT)
    assert (child.returncode, errors) == (0, b""), errors.decode()
    print(output.decode())
    assert sum(int(line.rpartition(" ")[2]) for line in output.decode().splitlines()) == 3 * COUNT
