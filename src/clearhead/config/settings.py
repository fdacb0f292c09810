"""Base class of all settings: frozen pydantic models that reject unknown keys.

`Settings.build(data, where)` turns pydantic's errors into one line each: key, value, what is allowed, and the nearest
match for an unknown key.
"""

import difflib
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from clearhead.errors import ConfigError

MAX_NAME_CHARS, MAX_NAMES = 40, 40  # limits of the list of known names in an error
MAX_COMPARED, MAX_COMPARED_CHARS = 1000, 100  # names to compare: difflib takes their number × their lengths
MAX_LINES = 20  # of one error


class Settings(BaseModel):
    """A group of settings: immutable, no unknown keys, no type coercion ("8" is not a number)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, ser_json_inf_nan="null")

    @classmethod
    def build(cls, data: Any, where: str = "") -> Self:
        """Validate plain data; `where` (a file or a section) starts every error line."""
        prefix = f"{where}: " if where else ""
        if not isinstance(data, Mapping):
            raise ConfigError(f"{prefix}expected settings as `key: value`, found {_shown(data)}")
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            # Skip defaults that could not be computed because another key was wrong.
            errors = [e for e in error.errors(include_url=False) if e["type"] != "default_factory_not_called"]
            errors.sort(key=lambda e: e["type"] != "extra_forbidden")  # a misspelled key explains a missing one
            lines = [prefix + line for e in errors[:MAX_LINES] for line in _error_line(cls, e).splitlines()]
            if len(errors) > MAX_LINES:
                lines.append(f"{prefix}and {len(errors) - MAX_LINES:,} more errors")
            raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def on_off(value: Any) -> Any:
    """Undo YAML's reading of `on` and `off` as booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def as_tuple(value: Any) -> Any:
    """Accept one name or a list of names as a tuple."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        raise ValueError(f"{value!r:.60} is neither a name nor a list; write one name, or several like [full, window]")
    return tuple(value)


def nearest(name: str, known: list[str]) -> str:
    """Return `; did you mean heads?`, or `; known: …` if nothing is close."""
    comparable = [key for key in known[:MAX_COMPARED] if max(len(key), len(name)) <= MAX_COMPARED_CHARS]
    close = difflib.get_close_matches(name, comparable, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    shown = [key if len(key) <= MAX_NAME_CHARS else key[: MAX_NAME_CHARS - 1] + "…" for key in sorted(known)]
    return f"; known: {', '.join(shown[:MAX_NAMES])}" + (
        f" and {len(shown) - MAX_NAMES:,} more" if len(shown) > MAX_NAMES else ""
    )


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a group of settings"
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a huge number"
    return text if len(text) <= 60 else text[:57] + "…"


def _error_line(cls: type[BaseModel], error: ErrorDetails) -> str:
    """Format one pydantic error as one line that ends with the fix."""
    location = [
        str(part) if str(part).isprintable() and len(str(part)) <= 60 else _shown(part) for part in error["loc"]
    ]
    key, value, context = ".".join(location), _shown(error["input"]), error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            return f"{key}: unknown setting{nearest(location[-1], _fields(cls, location[:-1]))}"
        case "missing":
            return f"{key}: missing; add it"
        case "literal_error":
            return f"{key}: {value} is not allowed; use {context['expected'].replace(chr(39), '')}"
        case "greater_than_equal":
            return f"{key}: {value} is too small; use {context['ge']:g} or more"
        case "greater_than":
            return f"{key}: {value} is too small; use more than {context['gt']:g}"
        case "less_than_equal":
            return f"{key}: {value} is too large; use at most {context['le']:,}"
        case "less_than":
            return f"{key}: {value} is too large; use less than {context['lt']:g}"
        case "int_type" | "int_from_float" | "int_parsing":
            return f"{key}: {value} is not a whole number; write it like 8, without quotes"
        case "float_type" | "float_parsing":
            return f"{key}: {value} is not a number; write it like 0.1, without quotes"
        case "finite_number":
            return f"{key}: {value} is not a finite number; give an ordinary one, like 0.1"
        case "bool_type" | "bool_parsing":
            return f"{key}: {value} is neither true nor false; use one of them"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{key}: {value} is not a group of settings; write {key}.{_first(cls, location)}=…"
        case "too_short":
            return f"{key}: empty; name at least one"
        case "string_type":
            return f"{key}: {value} is not a string; give a name"
        case "value_error":  # from our validators, whose messages name the keys
            return (f"{key}: " if key else "") + str(context["error"])
        case _:
            return f"{key}: {error['msg'][:1].lower() + error['msg'][1:]} (found {value})"


def _first(cls: type[BaseModel], path: list[str]) -> str:
    return next(iter(_fields(cls, path)), "key")


def _fields(cls: type[BaseModel], path: list[str]) -> list[str]:
    """Return the keys of the group at `path` below `cls`."""
    for name in path:
        if name.isdigit():  # list index: every item has the same keys
            continue
        field = cls.model_fields.get(name)
        parts = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        group = next((part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)), None)
        if group is None:
            return []
        cls = group
    return list(cls.model_fields)
