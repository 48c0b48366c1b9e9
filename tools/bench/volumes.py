"""Volumes of a known speed: file systems on loop devices, throttled by the blkio cgroup. Needs root and, for the
throttle, cgroup v1."""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

BLKIO = Path("/sys/fs/cgroup/blkio")


@contextmanager
def volumes(sizes: Sequence[int], folder: str) -> Iterator[list[Path]]:
    """Make a file system of each size in bytes on a loop device of its own; yield where they are mounted. folder: where
    the devices' files are."""
    with ExitStack() as stack:
        yield [stack.enter_context(volume(size, folder)) for size in sizes]


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
def volume(size: int, folder: str, thin: bool = False) -> Iterator[Path]:
    """Make a file system on a loop device; yield where it is mounted. thin: whether its file takes no space yet."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        image, mounted = Path(place, "image"), Path(place, "mounted")
        mounted.mkdir()
        with open(image, "wb") as file:
            if thin:
                file.truncate(size)
            else:
                os.posix_fallocate(file.fileno(), 0, size)
        run_command("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", image)
        device = run_command("losetup", "--find", "--show", "--direct-io=on", image).strip()
        try:
            run_command("mount", device, mounted)
            try:
                yield mounted
            finally:
                run_command("umount", mounted)
        finally:
            run_command("losetup", "--detach", device)


def run_command(*command: object) -> str:
    """Run a command that succeeds; return what it prints."""
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout
