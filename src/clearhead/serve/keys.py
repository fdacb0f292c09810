"""API keys: from a file with one `name: key` (or just a key) a line, or from the environment."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from clearhead.errors import UserError
from clearhead.files import read_text

log = logging.getLogger("clearhead")
ENVIRONMENT = "CLEARHEAD_API_KEYS"  # keys separated by commas
MIN_CHARS, MAX_CHARS, MAX_KEYS = 16, 512, 1000


class Keys:
    """The keys that may call; without any, everybody may. Only their hashes are kept."""

    def __init__(self, keys: Iterable[str] = (), file: Path | None = None):
        self.file = file
        self._given = [("", key) for key in keys]
        self._hashes: list[tuple[str, bytes]] = []
        self.reload()

    @classmethod
    def load(cls, file: Path | None) -> Keys:
        """The keys of a file and of the environment."""
        given = [key.strip() for key in os.environ.get(ENVIRONMENT, "").split(",")]
        return cls([key for key in given if key], file)

    def __bool__(self) -> bool:
        """Whether a key is needed."""
        return bool(self._hashes)

    def reload(self) -> None:
        """Read the file again; one that cannot be used changes nothing and is a UserError."""
        named = [*self._given, *([] if self.file is None else _read(self.file))]
        where = ENVIRONMENT if self.file is None else str(self.file)
        if len(named) > MAX_KEYS:
            raise UserError(f"{where}: {len(named):,} keys; at most {MAX_KEYS:,} are allowed")
        for number, (_, key) in enumerate(named):
            if not MIN_CHARS <= len(key) <= MAX_CHARS or not key.isascii() or not key.isprintable() or " " in key:
                raise UserError(
                    f"{where}: key {number + 1} needs {MIN_CHARS} to {MAX_CHARS} printable ASCII characters; "
                    "make one with: openssl rand -hex 24"
                )
        self._hashes = [(name or f"key-{number + 1}", _hash(key)) for number, (name, key) in enumerate(named)]

    def find(self, key: str) -> str | None:
        """The name of a key, or None; compares with all of them in constant time."""
        digest, found = _hash(key), None
        for name, known in self._hashes:
            if hmac.compare_digest(digest, known):
                found = name
        return found


def key_of(authorization: str) -> str | None:
    """The key of an Authorization header: a bearer token, or the password that a browser sends."""
    scheme, _, value = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return None
    return None


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def _read(file: Path) -> list[tuple[str, str]]:
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); check --api-keys") from None
    if mode & stat.S_IROTH:
        log.warning("%s can be read by every user of this machine; run: chmod 600 %s", file, file)
    keys = []
    for line in read_text(file).splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            name, _, key = line.rpartition(":")
            keys.append((name.strip()[:40], key.strip()))
    if not keys:
        raise UserError(f"{file}: no keys in it; write one per line, like laptop: {'x' * MIN_CHARS}")
    return keys
