"""Files of prepared sets, read by memory map."""

import errno
import mmap
import os
import resource
import weakref
from pathlib import Path

from llmtrain_data.errors import DataError
from llmtrain_data.untrusted import reason, regular


class File:
    """A file read by memory map, and watched for changes. content: its bytes, as they were long when it was opened."""

    def __init__(self, path: Path) -> None:
        """Open a regular file. Raises DataError for a pipe, a device or a folder, and where it cannot be read."""
        self.path = path
        try:
            self._descriptor = regular(str(path), os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            size = os.fstat(self._descriptor).st_size
            mapped = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise DataError(f"{path} cannot be read: {reason(error)}; raise the limit with ulimit -n") from error
            raise DataError(
                f"{path} cannot be read: {reason(error)}; expected one that `llmtrain data prepare` wrote"
            ) from error
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


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as it may: each prepared set takes four."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
