"""Run many commands at the cost of one Python start-up, by forking a process that has imported torch.

`python -m tests.cli.forked` reads a list of [arguments, stdin, faults], writes a list of [exit code, stdout, stderr].
Faults are what is wrong with descriptors: {"1": "closed"}, "full" (the disk) or "left" (the reader of the pipe).
"""

import base64
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from tests.cli.models import start

NO_FAULTS: Mapping[str, str] = {}


def call(arguments: list[str], stdin: bytes, faults: Mapping[str, str] = NO_FAULTS) -> tuple[int, str, str]:
    """Run `clearhead` with these arguments in a forked process."""
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        source.write(stdin)
        source.seek(0)
        child = os.fork()
        if child == 0:
            for number, file in enumerate((source, output, errors)):
                os.dup2(file.fileno(), number)
            for number, fault in faults.items():
                break_descriptor(int(number), fault)
            sys.stdin, sys.stdout, sys.stderr = (open_stream(number) for number in (0, 1, 2))
            run(arguments)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for file in (output, errors):
            file.seek(0)
        return code, output.read().decode(errors="surrogateescape"), errors.read().decode(errors="surrogateescape")


def break_descriptor(number: int, fault: str) -> None:
    """Close a standard stream, or send it to a full disk or a pipe whose reader has left."""
    if fault == "closed":
        os.close(number)
    elif fault == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)
    else:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, number)


def open_stream(number: int) -> IO[str] | None:
    """Open a standard stream as Python does at its start; None if it is closed."""
    try:
        os.fstat(number)
    except OSError:
        return None
    return os.fdopen(number, "r" if number == 0 else "w", 1 if number == 2 else -1)


def run(arguments: list[str]) -> None:
    """Run `clearhead` as Python would, and end this process."""
    code: object = 1
    try:
        sys.argv = ["clearhead", *arguments]
        from clearhead.cli import main

        main(ends_process=True)
        code = 0
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None:
                    stream.flush()
            except OSError:
                code = 120
        os._exit(code if isinstance(code, int) else 0)


def calls(cases: list[tuple[Any, ...]], folder: Path) -> list[tuple[int, str, str]]:
    """Run commands, (arguments, stdin) or (arguments, stdin, faults), in a folder; return code, stdout and stderr."""
    data = json.dumps([[arguments, base64.b64encode(stdin).decode(), *rest] for arguments, stdin, *rest in cases])
    child = start(module="tests.cli.forked", cwd=folder)
    output, errors = child.communicate(data.encode(), timeout=120)
    assert child.returncode == 0, errors.decode()
    return [tuple(each) for each in json.loads(output)]


if __name__ == "__main__":
    import clearhead.cli.console
    import clearhead.predict  # noqa: F401 (imports torch once)

    cases = json.load(sys.stdin)
    print(json.dumps([call(arguments, base64.b64decode(stdin), *rest) for arguments, stdin, *rest in cases]))
