"""What control groups leave to this process (Linux, "cgroups", versions 1 and 2). No torch in here.

A container may see the names of its host's groups, but only its own files: the missing ones are passed over.
"""

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""The file system of control groups, and the file that names this process's groups. Tests give others."""


@dataclass(frozen=True)
class Quota:
    """The processor time that a control group may take. cores: as a number of cores, which need not be whole; infinite
    without a quota. group: the number of the group's folder, by which processes of one machine know that they share
    the quota; 0 without one."""

    cores: float = math.inf
    group: int = 0


def group_limit(groups: Path = GROUPS, own: Path = OWN) -> int:
    """Return the least limit of memory, in bytes, of this process's control group and of those around it;
    `sys.maxsize` without one."""
    found = [sys.maxsize]
    for folder in _folders("memory", groups, own):
        for name in ("memory.max", "memory.limit_in_bytes"):
            found += [int(text) for text in _lines(folder / name) if text.isdigit()]
    return min(found)


def cpu_quota(groups: Path = GROUPS, own: Path = OWN) -> Quota:
    """Return the least quota of processor time of this process's control group and of those around it."""
    found = [Quota()]
    for folder in _folders("cpu", groups, own):
        names = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(line for name in names for line in _lines(folder / name)).split()
        # Without a quota, its place has "max" or -1.
        if len(words) == 2 and all(word.isdigit() for word in words):
            found.append(Quota(int(words[0]) / int(words[1]), folder.stat().st_ino))
    return min(found, key=lambda quota: quota.cores)


def usable_cores() -> int:
    """Return how many cores this process may use at once, by its affinity and its quota, at least 1."""
    return max(1, int(min(len(os.sched_getaffinity(0)), cpu_quota().cores)))


def memory_kills(groups: Path = GROUPS, own: Path = OWN, machine: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes the kernel has killed by now because memory ran out: those of this process's control
    group, or of the whole machine where the group does not count them. machine: the kernel's file of the latter."""
    names = ("memory.events", "memory.oom_control")
    files = [folder / name for folder in _folders("memory", groups, own) for name in names]
    counts = (line.split()[1] for file in (*files, machine) for line in _lines(file) if line.startswith("oom_kill "))
    return int(next(counts, "0"))


def _folders(controller: str, groups: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of this process's group that may have a controller's files, and of those around it."""
    for line in _lines(own):
        controllers, path = line.split(":", 2)[1:]
        if controllers and controller not in controllers.split(","):
            continue
        top = groups / controller if controllers else groups
        folder = top / path.lstrip("/")
        yield from (folder, *folder.parents[: len(folder.parts) - len(top.parts)])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
