"""The process that renders a chat template: a file of its own, run by path, that knows of jinja2 and nothing else.

A template comes with a checkpoint, from anyone. Jinja's immutable sandbox keeps it from whatever is not its own; memory
and time have the limits of this process, which the system holds even where Python would be busy inside one long call.
One JSON object a line comes in and one goes out: {"template", "variables"} to {"text"}, {"refused"} or {"error"}.
"""

import contextlib
import json
import signal
import sys
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

LARGEST_RANGE = 10_000
LARGEST_TEXT = 1 << 22  # characters
MEMORY = 1 << 29  # bytes of address space


class Refused(Exception):
    """The template itself says no, by raise_exception."""


def _refuse(message: object) -> None:
    raise Refused(str(message)[:300])


def _range(*bounds: int) -> range:
    found = range(*bounds)
    if len(found) > LARGEST_RANGE:
        raise OverflowError(f"a range of more than {LARGEST_RANGE} numbers")
    return found


def environment() -> ImmutableSandboxedEnvironment:
    """The sandbox, with whitespace treated as the makers of templates expect it."""
    extensions = ["jinja2.ext.loopcontrols"]
    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    found.globals |= {"raise_exception": _refuse, "range": _range}
    found.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return found


def render(template: str, variables: dict[str, Any]) -> str:
    """The text of a template."""
    pieces, size = [], 0
    for piece in environment().from_string(template).generate(variables):
        pieces.append(piece)
        size += len(piece)
        if size > LARGEST_TEXT:
            raise OverflowError(f"a text of more than {LARGEST_TEXT} characters")
    return "".join(pieces)


def answer(line: str) -> dict[str, str]:
    """What came of one line."""
    asked = json.loads(line)
    try:
        return {"text": render(asked["template"], asked["variables"])}
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
    """Answer until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the one who asks
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line)), flush=True)


if __name__ == "__main__":
    main()
