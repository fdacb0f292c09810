"""Public data that the recipes use: which files there are, whether they are present, and their download."""

import gzip
import hashlib
import http.client
import os
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from clearhead.config.load import read_yaml
from clearhead.config.settings import Settings
from clearhead.errors import UserError
from clearhead.files import write_bytes

TABLE = resources.files("clearhead.data") / "public_datasets.yaml"
TIMEOUT = 30  # seconds without any data
CHUNK = 1 << 16
OVERHEAD = 1 << 16  # bytes that a gzip file may be larger than its content

OnBytes = Callable[[int], None]


class PublicFile(Settings):
    """One file: where it belongs, what it holds when unpacked, and where it is published."""

    path: str  # below a data folder
    size: int = Field(ge=1, le=1 << 28)  # bytes, unpacked
    sha256: str  # of the unpacked content
    url: str = ""  # empty: its public path is not known


class PublicDataset(Settings):
    """Files with the same origin."""

    summary: str
    license: str  # as the source states it
    source: str  # page to read about the data
    files: Annotated[tuple[PublicFile, ...], BeforeValidator(tuple)]


class DownloadError(UserError):
    """A file that could not be downloaded, and why."""


class NoConnection(DownloadError):
    """A server that cannot be reached."""


@cache
def public_datasets() -> dict[str, PublicDataset]:
    """Return the known datasets by name."""
    table = read_yaml(TABLE.read_text(encoding="utf-8"), TABLE.name)
    return {name: PublicDataset.build(settings, where=name) for name, settings in table.items()}


def download_folder() -> Path:
    """Return the folder that files are downloaded to: CLEARHEAD_DATA, or ./data."""
    return Path(os.environ.get("CLEARHEAD_DATA") or "data")


def is_intact(path: Path, file: PublicFile) -> bool:
    """Whether a file, plain or gzip, has the content that the results of this package were measured on."""
    try:
        content = _unpack(path.read_bytes(), file)
    except (OSError, DownloadError):
        return False
    return hashlib.sha256(content).hexdigest() == file.sha256


def download(file: PublicFile, target: Path, on_bytes: OnBytes = lambda count: None) -> None:
    """Download a file, check its SHA-256 and write it atomically; `on_bytes` receives the size of each chunk."""
    content = _unpack(_fetch(file, on_bytes), file)
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
        raise DownloadError(f"{file.url} has changed: its SHA-256 is {digest} instead of {file.sha256}")
    write_bytes(target, gzip.compress(content, mtime=0) if target.suffix == ".gz" else content)


def _fetch(file: PublicFile, on_bytes: OnBytes) -> bytes:
    """Return what is at the file's address, over https only, and no more than the file is large."""
    data = bytearray()
    try:
        with urllib.request.urlopen(_request(file.url), timeout=TIMEOUT) as response:
            _request(response.geturl())  # after redirects
            while chunk := response.read(CHUNK):
                data += chunk
                on_bytes(len(chunk))
                if len(data) > file.size + OVERHEAD:
                    raise DownloadError(f"{file.url} is larger than {file.size:,} bytes")
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, DownloadError):
            raise
        kind = DownloadError if isinstance(error, urllib.error.HTTPError) else NoConnection
        raise kind(f"{file.url} cannot be reached ({error})") from None
    return bytes(data)


def _request(url: str) -> urllib.request.Request:
    if not url.startswith("https://"):
        raise DownloadError(f"{url} is not https")
    return urllib.request.Request(url, headers={"User-Agent": "clearhead"})


def _unpack(data: bytes, file: PublicFile) -> bytes:
    """Return the content of a plain or gzip file, bounded by its known size."""
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        return zlib.decompressobj(wbits=31).decompress(data, file.size + 1)
    except zlib.error as error:
        raise DownloadError(f"{file.path}: the gzip data is damaged ({error})") from None
