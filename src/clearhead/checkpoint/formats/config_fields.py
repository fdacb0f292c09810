"""Typed reading of foreign configs: each key is type-checked when read, and keys that were never read are reported."""

from collections.abc import Mapping
from typing import Any

from clearhead.errors import UserError

TYPE_NAMES: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


class Fields:
    """A foreign config as plain data; `where` is the prefix of every error."""

    def __init__(self, data: Mapping[str, Any], where: object):
        self.data, self.where, self.read = data, where, set[str]()

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer; without a default it is required."""
        return self._get(key, int, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Return an integer or float as a float."""
        return float(self._get(key, float, default))

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        return self._get(key, bool, default)

    def string(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        return self._get(key, str, default)

    def strings(self, key: str) -> list[str]:
        """Return a list of strings, empty if the key is missing."""
        self.read.add(key)
        value = self.data.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            raise UserError(f"{self.where}: {key}: {value!r:.60} is not a list of strings")
        return value or []

    def group(self, key: str) -> "Fields | None":
        """Return a nested config, if the key is there."""
        self.read.add(key)
        value = self.data.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise UserError(f"{self.where}: {key}: {value!r:.60} is not a group of settings")
        return Fields(value, f"{self.where}: {key}") if value else None

    def has(self, key: str) -> bool:
        """Whether a key has a value other than null."""
        return self.data.get(key) is not None

    def require(self, feature: str, key: str, *allowed: Any) -> None:
        """Refuse a feature that we do not support: if the key is there, its value must be one of `allowed`."""
        self.read.add(key)
        value = self.data.get(key)
        if value is not None and not any(type(value) is type(each) and value == each for each in allowed):
            raise UserError(f"{self.where}: {key}: {value!r:.60}: no support for {feature}")

    def ignore(self, *keys: str) -> None:
        """Mark keys as read that do not change what the model computes."""
        self.read.update(keys)

    def unknown(self) -> list[str]:
        """Return the keys that were never read."""
        return sorted(key[:60] for key, value in self.data.items() if key not in self.read and value is not None)

    def _get(self, key: str, kind: type, default: Any) -> Any:
        self.read.add(key)
        value = self.data.get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.where}: {key} is missing")
        valid = isinstance(value, int | float if kind is float else kind)
        if not valid or (kind is not bool and isinstance(value, bool)):
            raise UserError(f"{self.where}: {key}: {value!r:.60} is not {TYPE_NAMES[kind]}")
        return value
