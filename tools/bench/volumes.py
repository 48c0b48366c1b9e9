"""Volumes of a known speed, and volumes that fail: file systems on loop devices, throttled by the blkio cgroup. Needs
root and, for the throttle, cgroup v1."""

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

BLKIO = Path("/sys/fs/cgroup/blkio")
# ext4's and XFS's request to stop a file system at once, without writing its log, and the argument for that.
SHUTDOWN, WITHOUT_LOG = 0x8004587D, 2


@contextmanager
def volumes(sizes: Sequence[int], folder: str) -> Iterator[list[Path]]:
    """Make a file system of each size in bytes on a loop device of its own; yield where they are mounted. folder: of
    the devices' files."""
    with ExitStack() as stack:
        yield [stack.enter_context(_volume(size, folder)) for size in sizes]


@contextmanager
def throttled(paths: Sequence[Path], bytes_per_second: int) -> Iterator[None]:
    """Limit what this process reads from and writes to each mounted volume, in each direction, until the block ends."""
    group = BLKIO / f"bench-{os.getpid()}"
    group.mkdir()
    try:
        for path in paths:
            device = os.stat(path).st_dev
            for way in ("read", "write"):
                limit = f"{os.major(device)}:{os.minor(device)} {bytes_per_second}"
                (group / f"blkio.throttle.{way}_bps_device").write_text(limit)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (BLKIO / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


@contextmanager
def thin_volume(size: int, room: int, folder: str) -> Iterator[Path]:
    """Make a file system that says that it has `size` bytes, on a device that has `room` alone; writes beyond fail."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        _run("mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", place)
        try:
            with _volume(size, place, thin=True) as path:
                yield path
        finally:
            _run("umount", place)


def shut_down(path: Path) -> None:
    """Let everything that is read from or written to a mounted volume fail from now on, as if its device were gone."""
    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(folder, SHUTDOWN, WITHOUT_LOG.to_bytes(4, sys.byteorder))
    finally:
        os.close(folder)


def mount_again(path: Path) -> None:
    """Mount a volume anew after `shut_down`, as after a restart of the machine."""
    device = _run("findmnt", "--noheadings", "--output", "SOURCE", path).strip()
    _run("umount", path)
    _run("mount", device, path)


@contextmanager
def _volume(size: int, folder: str, thin: bool = False) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        image, mounted = Path(place, "image"), Path(place, "mounted")
        mounted.mkdir()
        with open(image, "wb") as file:
            if thin:
                file.truncate(size)
            else:
                os.posix_fallocate(file.fileno(), 0, size)
        _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", image)
        device = _run("losetup", "--find", "--show", "--direct-io=on", image).strip()
        try:
            _run("mount", device, mounted)
            try:
                yield mounted
            finally:
                _run("umount", mounted)
        finally:
            _run("losetup", "--detach", device)


def _run(*command: object) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout
