"""Volumes that fail: full before they say so, or gone. Needs root."""

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.bench.volumes import run_command, volume

# ext4's and XFS's request to stop a file system at once, without writing its log, and the argument for that.
SHUTDOWN, WITHOUT_LOG = 0x8004587D, 2


@contextmanager
def thin_volume(size: int, room: int, folder: str) -> Iterator[Path]:
    """Make a file system that says that it has `size` bytes, on a device that has `room` alone; writes beyond fail."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        run_command("mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", place)
        try:
            with volume(size, place, thin=True) as path:
                yield path
        finally:
            run_command("umount", place)


def shut_down(path: Path) -> None:
    """Let everything that is read from or written to a mounted volume fail from now on, as if its device were gone."""
    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(folder, SHUTDOWN, WITHOUT_LOG.to_bytes(4, sys.byteorder))
    finally:
        os.close(folder)


def mount_again(path: Path) -> None:
    """Mount a volume anew after `shut_down`, as after a restart of the machine."""
    device = run_command("findmnt", "--noheadings", "--output", "SOURCE", path).strip()
    run_command("umount", path)
    run_command("mount", device, path)
