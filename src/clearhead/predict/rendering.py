"""The process that renders chat templates: a script run by path that imports jinja2 and nothing of this package.

Templates come with checkpoints, from anyone. Jinja's immutable sandbox limits what a template may touch; the operating
system limits the memory and time of this process, even inside one long call.
One JSON object per line comes in and one goes out: {"template", "variables"} to {"text"}, {"refused"} or {"error"}.
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


def answer(line: str) -> dict[str, str]:
    """The reply to one line."""
    request = json.loads(line)
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


def main() -> None:
    """Answer lines until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the parent
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line)), flush=True)


if __name__ == "__main__":
    main()
