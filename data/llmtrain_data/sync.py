"""Make the entries of a folder durable."""

import errno
import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable: names of new files, renames and removals. Raises OSError with the path.

    Does nothing on a file system that has no fsync for folders.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Linux says this where a file system has no fsync for folders.
        if error.errno != errno.EINVAL:
            raise OSError(error.errno, error.strerror, str(folder)) from error
    finally:
        os.close(descriptor)
