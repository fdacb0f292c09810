"""Generate docs/reference.md from signatures and docstrings: python -m tools.api_reference"""

import inspect
import re
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel

TARGET = Path(__file__).parents[1] / "docs" / "reference.md"
MODULES = (
    "clearhead",
    "clearhead.predict",
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
HIDDEN = ("self", "cls", "others")  # `others` is read through the property `candidates`
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
    if isinstance(value, ModuleType):  # clearhead.train and clearhead.evaluate are callable
        value = getattr(import_module(f"{value.__name__}.api"), name)
    if get_origin(value) is Literal:
        return f"### `{name}`\n\nOne of {', '.join(f'`{each}`' for each in get_args(value))}.\n"
    if not inspect.isclass(value):
        return f"### `{name}`\n\n```\n{name}{_signature(value)}\n```\n\n{_doc(value)}\n"
    lines = [f"### class `{name}`\n"]
    if issubclass(value, BaseModel):
        lines += [
            _doc(value) + "\n",
            *(f"- `{key}` = `{_default(field)}`" for key, field in value.model_fields.items()),
        ]
    else:
        lines += [f"```\n{name}{_signature(value)}\n```\n\n{_doc(value)}\n"]
    for method, function in _members(value).items():
        if isinstance(function, property | cached_property):
            getter = function.fget if isinstance(function, property) else function.func
            lines.append(f"- `{method}`: {_first_paragraph(getter)}")
        elif inspect.isfunction(function) or isinstance(function, classmethod | staticmethod):
            plain = getattr(function, "__func__", function)
            if plain.__doc__:
                lines.append(f"- `{method}{_signature(plain)}`: {_first_paragraph(plain)}")
    return "\n".join(lines) + "\n"


def _members(value: type) -> dict[str, Any]:
    """Return the public attributes of a class, and the properties that it inherits from a class of this package."""
    bases = (each for each in value.__mro__[1:] if each.__module__.startswith("clearhead."))
    inherited = {
        name: member
        for base in bases
        for name, member in vars(base).items()
        if isinstance(member, property | cached_property) and name not in vars(value)
    }
    return {
        name: member for name, member in {**vars(value), **inherited}.items() if not name.startswith(("_", "model_"))
    }


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    return "derived" if field.default_factory is not None else repr(field.default)


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    hints = _type_hints(value)
    parameters = [
        each.replace(annotation=hints.get(name, each.annotation))
        for name, each in signature.parameters.items()
        if name not in HIDDEN
    ]
    text = str(signature.replace(parameters=parameters))
    text = re.sub(r"<factory>|<function (?:<lambda>|[^>])*>|<object object at [^>]*>", "…", text)
    text = re.sub(
        r"(?<=: )'([^']*)'|(?<=-> )'([^']*)'", lambda match: match[1] or match[2], text
    )  # annotations as written
    return re.sub(r"\b(?:clearhead|torch|typing|pathlib|collections\.abc|numpy)(?:\.\w+)*\.(\w+)", r"\1", text)


def _type_hints(value: Any) -> dict[str, Any]:
    """Return the annotations of a named tuple without ForwardRef; others are shown as written."""
    return get_type_hints(value) if inspect.isclass(value) and hasattr(value, "_fields") else {}


def _doc(value: Any) -> str:
    return inspect.getdoc(value) or ""


def _first_paragraph(value: Any) -> str:
    return _doc(value).split("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
    print(f"wrote {TARGET}")
