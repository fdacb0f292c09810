"""Watch which files this process opens, renames or deletes, by an audit hook."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "os.link"}
OPERATIONS |= {"os.symlink", "os.listdir", "os.scandir"}
ALLOWED = tuple(
    map(str, (sys.prefix, sys.base_prefix, Path(__file__).parents[1] / "src", "/proc", "/sys", "/dev/null"))
)
_watching: list[tuple[str, list[str]]] = []  # the folder, and operations outside of it


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching or event not in OPERATIONS:
        return
    folder, outside = _watching[-1]
    for path in arguments[: 2 if event == "os.rename" else 1]:
        if isinstance(path, bytes | str | os.PathLike):
            place = os.path.abspath(os.fsdecode(path))
            if place != folder and not place.startswith((folder + os.sep, *ALLOWED)):
                outside.append(f"{event} {place}")


@contextmanager
def operations_outside(folder: Path) -> Iterator[list[str]]:
    """Yield a list of the file operations outside of a folder, and of those of Python and the package itself."""
    if not hasattr(sys, "_clearhead_watches"):
        sys._clearhead_watches = True  # type: ignore[attr-defined]  # a hook cannot be removed
        sys.addaudithook(_hook)
    outside: list[str] = []
    _watching.append((os.path.abspath(folder), outside))
    try:
        yield outside
    finally:
        _watching.pop()
