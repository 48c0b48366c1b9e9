"""Read untrusted files: open only plain files in the folder itself, and follow no link."""

import os
from pathlib import Path

from llmtrain_data.untrusted import reason, regular


class DamagedError(Exception):
    """A checkpoint is damaged. The message is one sentence that names the file."""


def open_plain(path: Path) -> tuple[int, int]:
    """Open a file for reading; return its descriptor and its length in bytes.

    Raises DamagedError if it is missing, a link, a device or anything else that is not a plain file.
    """
    try:
        fd = regular(str(path), os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise DamagedError(f"{path.name} is missing") from error
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be opened: {reason(error)}") from error
    return fd, os.fstat(fd).st_size


def read_into(fd: int, view: memoryview, offset: int) -> bool:
    """Fill `view` with the file's bytes from `offset` on; return whether all of them could be read."""
    while view:
        try:
            count = os.preadv(fd, [view], offset)
        except OSError:
            return False
        if count == 0:
            return False
        view, offset = view[count:], offset + count
    return True
