"""Files of prepared sets, read by memory map."""

import mmap
import os
import stat
import weakref
from pathlib import Path

from llmtrain_data.errors import DataError


class File:
    """A file read by memory map, and watched for changes. content: its bytes, as they were long when it was opened."""

    def __init__(self, path: Path) -> None:
        """Open a plain file. Raises DataError for a pipe, a device or a folder, OSError where it cannot be read."""
        self.path = path
        # Without O_NONBLOCK, opening a named pipe would wait for ever.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a plain file; expected one that `llmtrain data prepare` wrote")
        mapped = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ) if status.st_size else b""
        self.content = memoryview(mapped)

    def changed(self) -> tuple[int, int]:
        """Return when the file was last written to, by the two clocks of a file, of which one cannot be set back.

        Raises DataError where it is shorter than it was: reading what is gone would kill the process.
        """
        status = os.fstat(self._descriptor)
        if status.st_size < len(self.content):
            raise DataError(
                f"{self.path} was cut from {len(self.content)} to {status.st_size} bytes while it was being read; "
                "prepare the data again or restore the file from a copy"
            )
        return status.st_mtime_ns, status.st_ctime_ns
