"""Read untrusted files: open only plain files in the folder itself, and follow no link."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from llmtrain_data.untrusted import reason, regular

from llmtrain.errors import RunFailedError

T = TypeVar("T")
# Seconds until the second try after an error of the file system.
PAUSE = 1.0
# The errors of an open that say what the path is: a link, a socket or a device, or something below a file. Without a
# number: anything else that is not a plain file.
_NOT_PLAIN = (None, errno.ELOOP, errno.ENXIO, errno.ENOTDIR)


class DamagedError(Exception):
    """A checkpoint is damaged. The message is one sentence that names the file."""


class UnreachableError(RunFailedError):
    """A checkpoint cannot be read now, but may be sound."""


def open_plain(path: Path) -> tuple[int, int]:
    """Open a file for reading; return its descriptor and its length in bytes.

    Raises DamagedError if it is missing, a link, a device or anything else that is not a plain file, and OSError if the
    file system does not say.
    """
    try:
        fd = regular(str(path), os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise DamagedError(f"{path.name} is missing") from error
    except OSError as error:
        if error.errno not in _NOT_PLAIN:
            raise
        raise DamagedError(f"{path.name} cannot be opened: {reason(error)}") from error
    return fd, os.fstat(fd).st_size


def read_into(fd: int, view: memoryview, offset: int) -> bool:
    """Fill `view` with the file's bytes from `offset` on; return whether the file has as many. Raises OSError."""
    while view:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            return False
        view, offset = view[count:], offset + count
    return True


def patiently(path: Path, read: Callable[[], T]) -> T:
    """Return what `read` reads at `path`. After an OSError it tries once more, as a new open cures a stale handle.

    Raises OSError with the path.
    """
    try:
        return read()
    except OSError:
        time.sleep(PAUSE)
    try:
        return read()
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from error
