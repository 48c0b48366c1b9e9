"""Who trains in a run's folder: one run at a time. No torch in here.

The first rank holds a POSIX lock on the file `lock` of the folder. The kernel frees it when the process ends in
whatever way, and network file systems pass it on to other hosts. Where a file system does not (its mount options
decide), what the file says still holds: whoever comes from another host asks Slurm whether the holder's job is over.
"""

import errno
import fcntl
import getpass
import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from llmtrain.cluster.slurm.queue import still_active

LOCK = "lock"
_HELD = (errno.EACCES, errno.EAGAIN)
# Linux's struct flock: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = "hhqqi0q"


@dataclass(frozen=True)
class Holder:
    """Whose run trains in a folder. started: of its process, in seconds since 1970. job, cluster: of Slurm, None
    outside. since: when it took the lock."""

    host: str
    pid: int
    started: float
    user: str
    job: str | None
    cluster: str | None
    since: str

    def __str__(self) -> str:
        job = f"job {self.job}, " if self.job else ""
        return f"{job}process {self.pid} of {self.user} on {self.host}, since {self.since}"


class RunLock:
    """The lock of a run's folder, which exists. `take` it; the end of a `with` block, or of the process, frees it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._file: int | None = None

    def take(self) -> str | None:
        """Take the lock and return None, or change nothing and return a sentence that says who has it.

        Raises OSError where the folder cannot be written.
        """
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        locked = _lock(file)
        holder = _parse(os.pread(file, 4096, 0))
        if locked is False or (holder is not None and not _is_gone(holder, kernel_says_so=locked is True)):
            os.close(file)
            # Someone else's lock that the kernel does not hold for us may be a stale one that nobody can ask about.
            advice = f"; if it has ended, delete {self._path}" if locked is not False else ""
            return f"{self._path.parent} is being trained in by {holder or 'another process'}{advice}"
        self._file = file
        self._write(json.dumps(asdict(_myself(os.environ))).encode())
        return None

    def release(self) -> None:
        """Let others have the folder; releasing what was not taken is harmless."""
        if self._file is not None:
            self._write(b"")
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _write(self, content: bytes) -> None:
        assert self._file is not None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, content, 0)
        # A network file system shows it to others once it is written out.
        os.fsync(self._file)


def holder_of(folder: Path) -> Holder | None:
    """Return who trains in a run's folder, as far as can be told from here; None for nobody.

    Only asks: the folder may be someone else's, and a run that starts just now must find the lock free.
    """
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        free, holder = _is_free(file), _parse(os.pread(file, 4096, 0))
    finally:
        os.close(file)
    return holder if holder is not None and (free is False or not _is_gone(holder, free is True)) else None


def _is_free(file: int) -> bool | None:
    """Return whether no other process has the lock, None where the file system has none."""
    try:
        answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return None
    return struct.unpack(_FLOCK, answer)[0] == fcntl.F_UNLCK


def _lock(file: int) -> bool | None:
    """Return whether the kernel gave the lock, None where the file system has none."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _HELD else None
    return True


def _is_gone(holder: Holder, kernel_says_so: bool) -> bool:
    """Whether a holder that is written down has ended without a word."""
    mine = _myself(os.environ)
    if holder.host == mine.host:
        return kernel_says_so or not _lives(holder)
    # Outside of jobs nothing names the cluster; squeue then asks the one that is there.
    if holder.job is None or mine.cluster not in (None, holder.cluster):
        return False
    # A job runs once at a time: this is a later start of it.
    return holder.job == mine.job or still_active(holder.job) is False


def _lives(holder: Holder) -> bool:
    try:
        return abs(psutil.Process(holder.pid).create_time() - holder.started) < 1
    except psutil.Error:
        return False


def _myself(environment: Mapping[str, str]) -> Holder:
    return Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        started=psutil.Process().create_time(),
        user=_user(),
        job=environment.get("SLURM_JOB_ID"),
        cluster=environment.get("SLURM_CLUSTER_NAME"),
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may know no name for it.
        return str(os.getuid())


def _parse(content: bytes) -> Holder | None:
    try:
        return Holder(**json.loads(content))
    except (ValueError, TypeError):
        return None
