"""Reading text from disk with errors that name the file, the line and the fix."""

from pathlib import Path

from clearhead.errors import UserError


def read_text(path: Path, limit: int = 1 << 20) -> str:
    """The whole of a small UTF-8 file (settings, not corpora); refuses one of more than `limit` bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; give a file") from None
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; check the path") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from None
    if len(data) > limit:
        raise UserError(f"{path} is larger than {limit:,} bytes, too large for a settings file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: not valid UTF-8; save the file as UTF-8") from None
