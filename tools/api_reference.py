"""Generate docs/reference.md from signatures and docstrings: python -m tools.api_reference"""

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "docs" / "reference.md"
MODULES = (
    "clearhead",
    "clearhead.config",
    "clearhead.model",
    "clearhead.ops.attention",
    "clearhead.inference",
    "clearhead.interpret",
    "clearhead.checkpoint",
    "clearhead.data",
    "clearhead.text",
    "clearhead.evaluate",
)
HEADER = """# API reference

Generated from the docstrings by `make docs`; do not edit by hand.
"""


def reference() -> str:
    """Return the whole page as Markdown."""
    return "\n".join([HEADER, *(_module(name) for name in MODULES)])


def _module(name: str) -> str:
    module = import_module(name)
    exported = {each: getattr(module, each) for each in module.__all__ if not each.startswith("_")}
    parts = [f"## `{name}`\n\n{_first_paragraph(module)}\n"]
    parts += [_entry(each, value) for each, value in sorted(exported.items()) if callable(value)]
    return "\n".join(parts)


def _entry(name: str, value: Any) -> str:
    if not inspect.isclass(value):
        return f"### `{name}{_signature(value)}`\n\n{_doc(value)}\n"
    lines = [f"### class `{name}{_signature(value)}`\n\n{_doc(value)}\n"]
    for method, function in vars(value).items():
        if method.startswith("_"):
            continue
        if isinstance(function, property) and function.fget is not None:
            lines.append(f"- `{method}`: {_first_paragraph(function.fget)}")
        elif inspect.isfunction(function) or isinstance(function, classmethod | staticmethod):
            plain = getattr(function, "__func__", function)
            if plain.__doc__:
                lines.append(f"- `{method}{_signature(plain)}`: {_first_paragraph(plain)}")
    return "\n".join(lines) + "\n"


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [each for name, each in signature.parameters.items() if name != "self"]
    text = str(signature.replace(parameters=parameters))
    text = re.sub(r"<factory>|<function .*?>|<object object at .*?>", "…", text)
    return re.sub(r"\b(?:clearhead|torch|typing|pathlib|collections\.abc|numpy)(?:\.\w+)*\.(\w+)", r"\1", text).replace(
        "'", ""
    )


def _doc(value: Any) -> str:
    return inspect.getdoc(value) or ""


def _first_paragraph(value: Any) -> str:
    return _doc(value).split("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
    print(f"wrote {TARGET}")
