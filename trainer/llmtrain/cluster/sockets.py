"""The processors (CPU sockets) of this machine, and the devices that are attached to them. No torch in here."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

SYS = Path("/sys")
"""The folder of the kernel's files. Tests give another one."""

Cores = Mapping[int, frozenset[int]]
"""The numbers of the cores of each socket."""


def cores_by_socket(sys: Path = SYS) -> Cores:
    """Return the cores of each socket of this machine; nothing if the kernel does not say."""
    found: dict[int, set[int]] = {}
    for file in (sys / "devices/system/cpu").glob("cpu[0-9]*/topology/physical_package_id"):
        if (text := file_text(file)).isdigit():
            found.setdefault(int(text), set()).add(int(file.parts[-3].removeprefix("cpu")))
    return {number: frozenset(cores) for number, cores in sorted(found.items())}


def device_socket(device: Path, cores: Cores) -> int | None:
    """Return the socket that a device is attached to, None if unknown. device: its folder below `SYS`."""
    local = file_text(device / "local_cpulist")
    if not local or file_text(device / "numa_node") == "-1":
        return None
    return _socket_with(int(local.replace(",", "-").split("-")[0]), cores)


def volume_socket(path: str, cores: Cores, sys: Path = SYS) -> int | None:
    """Return the socket that the drive of a folder is attached to; None if unknown, and for file systems that are on no
    drive of this machine."""
    with suppress(OSError):
        number = os.stat(path).st_dev
        device = (sys / f"dev/block/{os.major(number)}:{os.minor(number)}").resolve()
        # The folder of a partition is inside of that of its drive, which is inside of that of a PCI device.
        for folder in (device, *device.parents):
            if (folder / "local_cpulist").exists():
                return device_socket(folder, cores)
    return None


def own_socket(cores: Cores, allowed: frozenset[int], local: tuple[int, int], near: int | None = None) -> int | None:
    """Return the socket for one of a machine's ranks; None if the kernel names no socket.

    allowed: cores that the rank may use. local: the rank's number among the machine's ranks, and their number.
    Neighbouring ranks share a socket. near: the socket of the rank's accelerator, which it takes if it may.
    """
    usable = [number for number, own in cores.items() if own & allowed]
    if not usable:
        return None
    rank, ranks = local
    return near if near in usable else usable[min(rank, ranks - 1) * len(usable) // ranks]


def file_text(file: Path) -> str:
    """Return a small file's text; nothing if it cannot be read."""
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError):
        return ""


def _socket_with(core: int, cores: Cores) -> int | None:
    return next((number for number, own in cores.items() if core in own), None)
