"""Reading files that may come from a stranger: regular files alone are opened, and no more is read than expected."""

import json
import os
import stat
from pathlib import Path
from typing import Any

LARGEST_JSON = 8 << 20
"""Bytes of the largest JSON file that is read whole, as a model's configuration or an index of its weights."""

LONGEST_REASON = 200
"""Characters of what a library says is wrong with a file; what follows may be the file's content."""


class UnreadableError(ValueError):
    """A file that cannot be read. Says why, in the second half of a sentence, without the file's name."""


def regular(path: str, flags: int) -> int:
    """Open a regular file; an `opener` for `open`. Raises OSError for a named pipe, a device or a folder."""
    # Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "it is no regular file", path)
    return descriptor


def read_bytes(path: Path, most: int) -> bytes:
    """Return what a file holds. most: bytes. Raises UnreadableError for a longer one, and for what is no regular file.

    Of a file whose size is not known beforehand, as of those in /proc, no more than that is read either.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            size = os.fstat(file.fileno()).st_size
            content = b"" if size > most else file.read(most + 1)
    except (OSError, ValueError) as error:
        raise UnreadableError(reason(error)) from error
    if max(size, len(content)) > most:
        raise UnreadableError(f"it has {max(size, len(content))} bytes or more, expected at most {most}")
    return content


def read_text(path: Path, most: int) -> str:
    """Return the text of a UTF-8 file. most: bytes. Raises UnreadableError."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise UnreadableError(f"it is no UTF-8 text, first at byte {error.start}") from error


def read_json(path: Path, most: int = LARGEST_JSON) -> Any:
    """Return what a JSON file holds. most: bytes. Raises UnreadableError."""
    text = read_text(path, most)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UnreadableError(f"it is no JSON: {error}") from error
    except ValueError as error:
        raise UnreadableError("it is no JSON that can be read: a number in it has thousands of digits") from error
    except RecursionError as error:
        raise UnreadableError("its JSON is nested too deeply") from error


def reason(error: BaseException) -> str:
    """Return why the operating system or a library refuses a file, in one short line without the file's name."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = str(getattr(error, "strerror", None) or error).strip() or type(error).__name__
    line = text.splitlines()[0]
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON - 3]}..."
