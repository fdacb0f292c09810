"""Run many commands at the cost of one Python start-up, by forking a process that has imported torch.

`python -m tests.cli.forked` reads a list of [arguments, stdin] and writes a list of [exit code, stdout, stderr].
"""

import base64
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.cli.models import start


def call(arguments: list[str], stdin: bytes) -> tuple[int, str, str]:
    """Run `clearhead` with these arguments in a forked process."""
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        source.write(stdin)
        source.seek(0)
        child = os.fork()
        if child == 0:
            for number, file in enumerate((source, output, errors)):
                os.dup2(file.fileno(), number)
            sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
            sys.argv = ["clearhead", *arguments]
            code: object = 1
            try:
                from clearhead.cli import main

                main()
            except SystemExit as stop:
                code = stop.code
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code if isinstance(code, int) else 0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for file in (output, errors):
            file.seek(0)
        return code, output.read().decode(), errors.read().decode()


def calls(cases: list[tuple[list[str], bytes]], folder: Path) -> list[tuple[int, str, str]]:
    """Run commands in a working folder; return exit code, stdout and stderr of each."""
    data = json.dumps([[arguments, base64.b64encode(stdin).decode()] for arguments, stdin in cases])
    child = start(module="tests.cli.forked", cwd=folder)
    output, errors = child.communicate(data.encode(), timeout=120)
    assert child.returncode == 0, errors.decode()
    return [tuple(each) for each in json.loads(output)]


if __name__ == "__main__":
    import clearhead.predict  # noqa: F401 (imports torch once)

    print(json.dumps([call(arguments, base64.b64decode(stdin)) for arguments, stdin in json.load(sys.stdin)]))
