"""Terminal safety: no control sequence of a model, a file or an argument reaches the terminal."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from clearhead.cli.output import UNSAFE
from tests.cli.models import start

CASES = int(os.environ.get("CLEARHEAD_TERMINAL_CASES", 30))  # 0: all
# what we print ourselves on a terminal that can: bold, dim and colors, and what a progress bar needs
OWN = re.compile(r"\x1b\[(?:0|1|2|[12];3[0-7]|3[0-7]|38;5;\d+|38;2;\d+;\d+;\d+)m")
PROGRESS = re.compile(r"\x1b\[\?25[lh]|\x1b\[2K|\x1b\[1A|\r")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_no_control_sequence_reaches_the_terminal(tmp_path: Path) -> None:
    child = start(tmp_path, CASES, 7, module="tests.cli.hostile")
    output, errors = child.communicate(timeout=3600)
    assert child.returncode == 0, errors.decode()
    results = json.loads(output)
    escaped = 0
    for terminal, arguments, code, text in results:
        assert "Traceback" not in text, (arguments, text)
        assert code in (0, 2), (arguments, code, text)
        if terminal != "dumb":
            text = OWN.sub("", text)
            if "train" in arguments[:2]:
                text = PROGRESS.sub("", text)
        assert not UNSAFE.search(text), (terminal, arguments, text)
        escaped += "\\x1b" in text or "\\u001b" in text
    assert escaped > len(results) / 5
    print(f"{len(results)} cases, {escaped} with control sequences shown escaped, 0 control characters")
