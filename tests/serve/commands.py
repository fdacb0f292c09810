"""`clearhead serve` as a process of its own."""

import contextlib
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def started(
    models: Sequence[str], settings: str = "", options: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command on a free port, and its URL; `settings` is its config file."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serve.yaml"
        config.write_text(settings or "{}")
        command = [
            sys.executable,
            "-m",
            "clearhead",
            "serve",
            *models,
            "--port",
            "0",
            "--config",
            str(config),
            *options,
        ]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r"http://\S+", line):
                    break
            else:
                raise AssertionError((process.wait(), lines))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield process, found[0]
        finally:
            process.kill()
            process.wait()
            process.stderr.close()
