"""The process that renders chat templates: a script run by path that imports jinja2 and nothing of this package.

Templates come with checkpoints, from anyone. Jinja's immutable sandbox limits what a template may touch; the operating
system limits the memory and time of this process, even inside one long call, and lets it neither write files nor start
processes. One JSON object per line comes in and one goes out: {"number", "template", "variables", "seconds"} to
{"number"} with "text", "refused" or "error".
"""

import contextlib
import json
import signal
import sys
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RANGE = 10_000
MAX_TEXT = 1 << 22  # characters
MEMORY = 1 << 29  # bytes of address space


class Refused(Exception):
    """The template refused the conversation by raise_exception."""


def _refuse(message: object) -> None:
    raise Refused(str(message)[:300])


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_RANGE:
        raise OverflowError(f"a range of more than {MAX_RANGE} numbers")
    return numbers


def environment() -> ImmutableSandboxedEnvironment:
    """The sandbox, with the whitespace rules that chat templates are written for."""
    extensions = ["jinja2.ext.loopcontrols"]
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    sandbox.globals |= {"raise_exception": _refuse, "range": _range}
    sandbox.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return sandbox


def render(template: str, variables: dict[str, Any]) -> str:
    """The text of a template."""
    pieces, size = [], 0
    for piece in environment().from_string(template).generate(variables):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_TEXT:
            raise OverflowError(f"a text of more than {MAX_TEXT} characters")
    return "".join(pieces)


def answer(request: dict[str, Any]) -> dict[str, str]:
    """The reply to one request."""
    try:
        return {"text": render(request["template"], request["variables"])}
    except Refused as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"error": "it takes too much memory"}
    except (
        TemplateError,
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
    ) as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def limit() -> None:
    """Have the operating system limit this process, where it can."""
    with contextlib.suppress(ImportError):
        import resource

        limits = {"AS": MEMORY, "FSIZE": 0, "NPROC": 0, "CORE": 0}
        for name, value in limits.items():
            with contextlib.suppress(AttributeError, ValueError, OSError):  # not on every system
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def main() -> None:
    """Answer lines until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the parent
    limit()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        _set_alarm(request["seconds"])
        reply = {"number": request["number"]} | answer(request)
        _set_alarm(0)
        print(json.dumps(reply), flush=True)


def _set_alarm(seconds: float) -> None:
    """End this process after some seconds, even if its parent was killed."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


if __name__ == "__main__":
    main()
