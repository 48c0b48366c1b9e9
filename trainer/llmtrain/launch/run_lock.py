"""Lock a run's folder, so that only one run trains in it at a time. No torch in here.

The first rank holds a POSIX lock on the file `lock` of the folder. The kernel frees the lock when the process ends for
any reason, and network file systems enforce it on other hosts if their mount options say so. If they do not, the file
names the holder, and its modification time is a lease that the holder renews every few seconds. A start that cannot
tell otherwise whether the holder lives watches the lease, and takes the folder if nobody renews it.

A start takes the folder by creating a file that is named after the lease it takes over: on any file system only one
start succeeds. A start compares a lease only with itself, because the clocks of two hosts may differ, and counts looks
instead of seconds, so that a machine may be suspended for any time.
"""

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from llmtrain.errors import RunFailedError
from llmtrain.launch.lock_holder import Holder, encode, is_gone, parse, this_process

LOCK = "lock"
# Seconds between renewals of the lease, and between looks at it.
RENEWAL, LOOK = 2.0, 1.0
# The folder is free after this many looks without a renewal: if the kernel reports no lock (a network file system may
# hide another host's lock), and if the file system has no locks.
UNLOCKED_LOOKS, LOCKLESS_LOOKS = 10, 60
# The fewest looks, however old the lease seems: clocks may differ.
FEWEST_LOOKS = 5
_LOCKED_BY_OTHERS = (errno.EACCES, errno.EAGAIN)
# Linux's struct flock: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = "hhqqi0q"
# The file has this length while it is held, so that one write replaces all of it.
_LENGTH = 1024


@dataclass(frozen=True)
class _State:
    """The lock file at one look. renewed: its modification time in ns."""

    content: bytes
    renewed: int

    @property
    def holder(self) -> Holder | None:
        return parse(self.content)

    @property
    def age(self) -> float:
        """Seconds since the last renewal, by the clock of this host."""
        return time.time() - self.renewed / 1e9


class _LeaseWatch:
    """What a start that wants the folder has seen. attempts: how many other starts tried to take over the current lease
    and ended before they had it. why: what this start waits for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: _State | None = None
        self._left = self._limit = self.attempts = 0
        self.why = ""

    def is_free(self, state: _State, unlocked: bool | None) -> bool | None:
        """Return whether the folder is free, None if more looks are needed. unlocked: whether the kernel granted the
        lock, None if the file system has no locks."""
        if unlocked is False:
            return False
        if self._seen is None or state.content != self._seen.content or (state != self._seen and state.holder is None):
            gone = state.holder is None or is_gone(state.holder, unlocked)
            if gone is False:
                return False
            self._limit = LOCKLESS_LOOKS if unlocked is None else UNLOCKED_LOOKS
            self._seen, self.attempts, self._left = state, 0, 0 if gone else _looks(state.age, self._limit)
            self.why = f"{self._folder} was last trained in by {state.holder}; {self._patience} whether it has ended"
        elif state != self._seen:
            # The lease was renewed.
            return False
        self._left -= 1
        return self._left < 0 or None

    def give_way(self) -> None:
        """Keep watching, because another start is about to take the folder."""
        self.attempts, self._left = self.attempts + 1, self._limit
        self.why = f"another start is about to train in {self._folder}; {self._patience} whether it does"

    @property
    def _patience(self) -> str:
        return f"waiting up to {self._left * LOOK:g} s to see"


class RunLock:
    """The lock of an existing run's folder. `take` it; the end of a `with` block, or of the process, frees it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        # Closing any of these descriptors frees the kernel's lock.
        self._files: list[int] = []
        self._content = b""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._lost = False

    def take(self, pause: Callable[[str], None]) -> str | None:
        """Take the lock and return None, or change nothing and return a sentence that names the holder.

        pause: called between two looks with a sentence that says what this start waits for; returns after `LOOK`
        seconds. Raises OSError if the folder cannot be written.
        """
        watch = _LeaseWatch(self._path.parent)
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
            unlocked, state = _lock(file), _look(file)
            free = watch.is_free(state, unlocked)
            if free and self._claim(file, state, watch.attempts):
                return None
            os.close(file)
            if free is False:
                return taken_by(self._path.parent, state.holder)
            if free:
                watch.give_way()
            pause(watch.why)

    @property
    def content(self) -> str:
        """What the file holds while this process has the lock; empty if it was not taken."""
        return self._content.decode()

    def shows(self, content: str) -> bool:
        """Return whether the file, opened anew, holds `content`. Not for the holder, whose lock it would free. Raises
        OSError."""
        file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return _look(file).content == content.encode()
        finally:
            os.close(file)

    def check(self) -> None:
        """Raise RunFailedError if another run had taken the folder at the last renewal."""
        if self._lost:
            raise RunFailedError(
                f"{self._path.parent} is now being trained in by {holder_of(self._path.parent) or 'another process'}, "
                "which took it while this run stood still"
            )

    def confirm(self) -> None:
        """Raise RunFailedError if another run has taken the folder by now."""
        self._lost = self._lost or not self._is_mine()
        self.check()

    def release(self) -> None:
        """Free the lock; does nothing if it was not taken."""
        if not self._files:
            return
        self._over.set()
        # A renewal that hangs on a lost file server does not touch the file again.
        self._thread.join(LOOK)
        # On a disk that is gone, the lease stays, of a process that has ended. An error here would hide what ended the
        # run.
        with suppress(OSError):
            if self._is_mine():
                os.ftruncate(self._files[-1], 0)
                os.fsync(self._files[-1])
        while self._files:
            with suppress(OSError):
                os.close(self._files.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _claim(self, file: int, state: _State, attempts: int) -> bool:
        """Take over the lease `state` unless another start has done so; return whether it worked.

        attempts: how many starts tried before and ended before they had it.
        """
        claim, following = (self._path.with_name(f"{LOCK}.{state.renewed}-{attempts + more}") for more in (0, 1))
        try:
            os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        except FileExistsError:
            return False
        # A network file system shows what another host wrote only after a new open. Since the last look, another start
        # may have taken over the lease and deleted its claim.
        again = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        self._files = [file, again]
        if _look(again) != state or following.exists():
            claim.unlink(missing_ok=True)
            os.close(self._files.pop())
            self._files.clear()
            return False
        self._content = encode(this_process(os.environ)).ljust(_LENGTH - 1) + b"\n"
        os.pwrite(again, self._content, 0)
        os.ftruncate(again, len(self._content))
        # A network file system shows the content to other hosts only after fsync.
        os.fsync(again)
        for path in self._path.parent.glob(f"{LOCK}.{state.renewed}-*"):
            path.unlink(missing_ok=True)
        self._thread.start()
        return True

    def _renew(self) -> None:
        """Renew the lease until it is released, or until another run has it."""
        while not self._over.wait(RENEWAL):
            self._lost = not self._is_mine()
            if self._lost:
                return
            # This takes the file system's own clock, and writes no data.
            with suppress(OSError):
                os.utime(self._files[-1])

    def _is_mine(self) -> bool:
        """Return whether no other run has taken the folder; True if the file cannot be read."""
        try:
            same = os.path.samestat(os.fstat(self._files[-1]), self._path.stat())
            return same and os.pread(self._files[-1], _LENGTH, 0) == self._content
        except OSError:
            return True


def taken_by(folder: Path, holder: Holder | None) -> str:
    """Return a sentence that a process trains in a run's folder."""
    who = holder or "another process"
    return f"{folder} is being trained in by {who}; stop it first, or give this run another name"


def locked_by(folder: Path) -> Holder | None:
    """Return the process of this machine that holds the kernel's lock of a run's folder; None if this machine knows of
    none. Does not wait, and does not take the lock."""
    with suppress(OSError):
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return _look(file).holder if _is_unlocked(file) is False else None
        finally:
            os.close(file)
    return None


def holder_of(folder: Path) -> Holder | None:
    """Return the process that trains in a run's folder, as far as this host can tell now; None if there is none.

    Does not take the lock: the folder may belong to another user, and a run that starts now must find the lock free.
    """
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        unlocked, state = _is_unlocked(file), _look(file)
    except OSError:
        return None
    finally:
        os.close(file)
    if state.holder is None or unlocked is False:
        return state.holder
    gone = is_gone(state.holder, unlocked)
    limit = (LOCKLESS_LOOKS if unlocked is None else UNLOCKED_LOOKS) * LOOK
    return None if gone or (gone is None and state.age > limit) else state.holder


def _looks(age: float, limit: int) -> int:
    """Return for how many looks to watch a lease. age: in seconds."""
    return min(limit, max(FEWEST_LOOKS, limit - int(age / LOOK)))


def _look(file: int) -> _State:
    return _State(os.pread(file, _LENGTH, 0), os.fstat(file).st_mtime_ns)


def _is_unlocked(file: int) -> bool | None:
    """Return whether no other process has the lock, None if the file system has no locks."""
    try:
        answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return None
    return struct.unpack(_FLOCK, answer)[0] == fcntl.F_UNLCK


def _lock(file: int) -> bool | None:
    """Return whether the kernel granted the lock, None if the file system has no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _LOCKED_BY_OTHERS else None
    return True
