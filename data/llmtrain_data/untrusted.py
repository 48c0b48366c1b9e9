"""Reads files that may be untrusted: it opens only regular files, and limits how much it reads."""

import json
import os
import stat
from pathlib import Path
from typing import Any

LARGEST_JSON = 8 << 20
"""Most bytes of a JSON file, such as a model's configuration or the index of its weights."""

LONGEST_REASON = 200
"""Most characters of a library's error message. Longer messages may contain the file's content."""


LFS, FETCH = b"version https://git-lfs", "Git LFS has not fetched it; run git lfs pull in its folder"
"""How a file begins that stands for one that Git LFS holds, and what to do."""


class UnreadableError(ValueError):
    """A file cannot be read. The message is a clause that says why, without the file's name."""


def regular(path: str, flags: int) -> int:
    """Open a regular file; use it as the `opener` of `open`. Raises OSError for a named pipe, a device or a folder."""
    # Without O_NONBLOCK, opening a named pipe would wait forever for a writer.
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "it is not a regular file", path)
    return descriptor


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a regular file. Raises UnreadableError if it has more than `most` bytes or is not regular.

    The limit also holds for files that do not report their size, such as those in /proc.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            size = os.fstat(file.fileno()).st_size
            content = b"" if size > most else file.read(most + 1)
    except (OSError, ValueError) as error:
        raise UnreadableError(reason(error)) from error
    if max(size, len(content)) > most:
        raise UnreadableError(f"it has {max(size, len(content))} bytes or more, expected at most {most}")
    if content.startswith(LFS):
        raise UnreadableError(FETCH)
    return content


def read_text(path: Path, most: int) -> str:
    """Return the text of a UTF-8 file of at most `most` bytes. Raises UnreadableError."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise UnreadableError(f"it is not UTF-8 text, first at byte {error.start}") from error


def read_json(path: Path, most: int = LARGEST_JSON) -> Any:
    """Return the content of a JSON file of at most `most` bytes. Raises UnreadableError."""
    text = read_text(path, most)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UnreadableError(f"it is not JSON: {error}") from error
    except ValueError as error:
        raise UnreadableError("it is not usable JSON: it contains a number with thousands of digits") from error
    except RecursionError as error:
        raise UnreadableError("its JSON is nested too deeply") from error


def reason(error: BaseException) -> str:
    """Return the message of an error about a file, as one short line without the file's name."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = str(getattr(error, "strerror", None) or error).strip() or type(error).__name__
    line = text.splitlines()[0]
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON - 3]}..."
