"""Memory-mapped files of prepared sets."""

import errno
import mmap
import os
import resource
import weakref
from pathlib import Path

from llmtrain_data.errors import DataError
from llmtrain_data.untrusted import reason, regular


class File:
    """A memory-mapped file that can detect changes. content: its bytes, at the size that it had when it was opened."""

    def __init__(self, path: Path) -> None:
        """Open a regular file. Raises DataError for a pipe, a device or a folder, and if it cannot be read."""
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
                f"{path} cannot be read: {reason(error)}; expected a file that `llmtrain data prepare` wrote"
            ) from error
        self.content = memoryview(mapped)

    def changed(self) -> tuple[int, int]:
        """Return the file's modification and status change times in ns. Programs can set back only the first.

        Raises DataError if the file has become shorter: reading beyond its end would kill the process.
        """
        status = os.fstat(self._descriptor)
        if status.st_size < len(self.content):
            raise DataError(
                f"{self.path} was truncated from {len(self.content)} to {status.st_size} bytes while it was in use; "
                "prepare the data again or restore the file from a backup"
            )
        return status.st_mtime_ns, status.st_ctime_ns


def allow_many_files() -> None:
    """Raise the process's limit of open files to the hard limit. Each prepared set takes four files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
