"""Files without names, whose bytes move past the page cache. No torch in here."""

import ctypes
import errno
import mmap
import os
from tempfile import mkstemp

from llmtrain.plan.placement import PAGE

# What file systems answer that cannot reserve space: those of networks, and many in user space.
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS)


def nameless_file(folder: str) -> int:
    """Return the descriptor of a new file for direct reads and writes, which is gone when it is closed. Raises
    OSError."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError:
        # Not every file system makes files without a name.
        empty, named = mkstemp(prefix=".llmtrain-", dir=folder)
        os.close(empty)
        try:
            return os.open(named, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        finally:
            os.unlink(named)


def take_space(file: int, nbytes: int) -> bool:
    """Let a new file, by its descriptor, have `nbytes` of zeros. Return whether their space is reserved: where the file
    system cannot, the file takes its space as it is written. Raises OSError."""
    # Not posix_fallocate, which writes a byte to each block where the file system cannot reserve them.
    while code := fallocate(file, nbytes):
        if code in _CANNOT_RESERVE:
            os.ftruncate(file, nbytes)
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


def fallocate(file: int, nbytes: int) -> int:
    """Call the system's fallocate for the first bytes of a file; return 0, or an errno."""
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return ctypes.get_errno() if call(file, 0, 0, nbytes) else 0


def probe(folder: str) -> bool:
    """Make a file of one page in a folder as a run does, write and read it, and return whether its space was reserved.
    Raises OSError."""
    file = nameless_file(folder)
    try:
        reserved = take_space(file, PAGE)
        # Its memory begins at a page.
        with mmap.mmap(-1, PAGE) as page:
            os.pwritev(file, [page], 0)
            os.preadv(file, [page], 0)
        return reserved
    finally:
        os.close(file)
