"""Settings in a foreign file: a key that is asked for has its type checked, and what nobody asked for is named."""

from collections.abc import Mapping
from typing import Any

from clearhead.errors import UserError

KINDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


class Fields:
    """A foreign config as plain data; `where` opens every error."""

    def __init__(self, data: Mapping[str, Any], where: object):
        self.data, self.where, self.seen = data, where, set[str]()

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number; without a default it must be there."""
        return self._take(key, int, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Any number."""
        return float(self._take(key, float, default))

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return self._take(key, bool, default)

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        return self._take(key, str, default)

    def texts(self, key: str) -> list[str]:
        """A list of texts, empty where there is none."""
        self.seen.add(key)
        found = self.data.get(key)
        if found is not None and not (isinstance(found, list) and all(isinstance(each, str) for each in found)):
            raise UserError(f"{self.where}: {key}: {found!r:.60} is no list of texts")
        return found or []

    def below(self, key: str) -> "Fields | None":
        """A group of settings, where there is one."""
        self.seen.add(key)
        found = self.data.get(key)
        if found is not None and not isinstance(found, Mapping):
            raise UserError(f"{self.where}: {key}: {found!r:.60} is no group of settings")
        return Fields(found, f"{self.where}: {key}") if found else None

    def has(self, key: str) -> bool:
        """Whether a key says anything."""
        return self.data.get(key) is not None

    def must(self, feature: str, key: str, *allowed: Any) -> None:
        """Refuse by name what we cannot do: a key that is there must have one of these values."""
        self.seen.add(key)
        found = self.data.get(key)
        if found is not None and not any(found == value and type(found) is type(value) for value in allowed):
            raise UserError(f"{self.where}: {key}: {found!r:.60}: {feature} cannot be represented here")

    def ignore(self, *keys: str) -> None:
        """These change nothing that a model computes."""
        self.seen.update(keys)

    def unknown(self) -> list[str]:
        """The keys that nobody asked for."""
        return sorted(key[:60] for key, value in self.data.items() if key not in self.seen and value is not None)

    def _take(self, key: str, kind: type, default: Any) -> Any:
        self.seen.add(key)
        found = self.data.get(key)
        found = default if found is None else found
        if found is None:
            raise UserError(f"{self.where}: {key} is missing")
        fits = isinstance(found, int | float if kind is float else kind)
        if not fits or (kind is not bool and isinstance(found, bool)):
            raise UserError(f"{self.where}: {key}: {found!r:.60} is not {KINDS[kind]}")
        return found
