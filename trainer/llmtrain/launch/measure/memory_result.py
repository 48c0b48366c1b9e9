"""Measured rates of a machine's memory and volumes, and the description that contains them. Pure data, no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from llmtrain_data import units
from llmtrain_data.output import table
from rich.table import Table

from llmtrain.cluster.description import Accelerator, Cluster, Host, Nvme
from llmtrain.launch.measure.result import as_data

Way = Literal["read", "write", "mixed"]
WAYS: tuple[Way, ...] = ("read", "write", "mixed")
"""mixed: reads and writes at once, as many of both; its rate counts both."""


@dataclass(frozen=True)
class Copy:
    """A copy within the host's memory, or between it and a GPU. rate: bytes that arrive per second."""

    name: str
    threads: int
    rate: float


@dataclass(frozen=True)
class StepRate:
    """The rate of the AdamW kernel of CPUs. elements: stepped per second. rate: bytes that it reads and writes per
    second."""

    threads: int
    elements: float
    rate: float


@dataclass(frozen=True)
class VolumeRate:
    """Transfers of one volume, or of several at once. path: its folder, or all. block: bytes of a transfer. depth:
    transfers of a volume at once. rate: bytes per second. socket: near or far, if the processor was chosen."""

    path: str
    way: Way
    block: int
    depth: int
    rate: float
    socket: Literal["near", "far"] | None = None


@dataclass(frozen=True)
class MemoryFound:
    """All measurements. sockets: the CPU socket of each volume, by path; None if it is not known. together: the path of
    all volumes."""

    copies: Sequence[Copy]
    stepped: Sequence[StepRate]
    volumes: Sequence[VolumeRate]
    sockets: dict[str, int | None]

    def best(self, path: str, way: Way) -> VolumeRate | None:
        """Return the fastest transfers of a volume by all processors."""
        own = [one for one in self.volumes if one.path == path and one.way == way and one.socket is None]
        return max(own, key=lambda one: one.rate, default=None)

    @property
    def beside_others(self) -> float:
        """The share of its own rate that a volume has while all others are busy too, at most 1."""
        together = self.best(TOGETHER, "mixed")
        alone = [best.rate for path in self.sockets if (best := self.best(path, "mixed")) is not None]
        return 1.0 if together is None else min(1.0, together.rate / sum(alone))

    @property
    def host(self) -> float:
        """Bytes per second that the processors have read and written: at least the bandwidth of the memory."""
        return max([2 * one.rate for one in self.copies if one.name == HOST] + [one.rate for one in self.stepped])

    @property
    def link(self) -> float | None:
        """Bytes per second between the host's pinned memory and a GPU, in the slower direction; None without a GPU."""
        return min((one.rate for one in self.copies if "pinned" in one.name), default=None)


HOST = "within the host's memory"
TOGETHER = "all together"


def described(cluster: Cluster, found: MemoryFound) -> Cluster:
    """Return the description with the measured figures in place of its own; the rest stays."""
    host = replace(cluster.node.host or Host(), bandwidth=units.rate(found.host))
    drives = {one.path: one for one in cluster.node.nvme}
    for path in found.sockets:
        drives[path] = _nvme(drives.get(path, Nvme(path=path)), found, host)
    node = replace(cluster.node, host=host, nvme=tuple(drives.values()))
    accelerator = cluster.accelerator
    if found.link is not None:
        accelerator = replace(accelerator or Accelerator(), host_link=units.rate(found.link))
    return replace(cluster, node=node, accelerator=accelerator)


def _nvme(drive: Nvme, found: MemoryFound, host: Host) -> Nvme:
    """Return a drive with the bandwidth that it has in both directions at once, as offloaded states are read and
    written at the same time, beside the other drives."""
    shares: tuple[tuple[Way, float], ...] = (("read", 1.0), ("write", 1.0), ("mixed", 0.5))
    rates = [best.rate * share for way, share in shares if (best := found.best(drive.path, way)) is not None]
    socket = found.sockets[drive.path]
    if socket is None or (host.sockets is not None and socket >= host.sockets):
        socket = drive.socket
    return replace(drive, bandwidth=units.rate(min(rates) * found.beside_others), socket=socket)


def plain(found: MemoryFound, after: Cluster) -> dict[str, Any]:
    """Return the measurements as plain data, in bytes and bytes per second. after: the description with them."""
    return {
        "copies": [asdict(one) for one in found.copies],
        "adamw": [asdict(one) for one in found.stepped],
        "volumes": [asdict(one) for one in found.volumes],
        "sockets": found.sockets,
        "cluster": as_data(after),
    }


def tables(found: MemoryFound) -> Iterator[Table]:
    """Yield tables of the copies, of the AdamW kernel and of the volumes."""
    copies = [(one.name, one.threads, units.rate(one.rate)) for one in found.copies]
    yield table(("copy", "threads", "rate"), copies)
    stepped = [(one.threads, units.number(one.elements) + "/s", units.rate(one.rate)) for one in found.stepped]
    yield table(("AdamW on threads", "elements", "reads and writes"), stepped)
    rows: list[tuple[object, ...]] = []
    cells = dict.fromkeys((one.path, one.socket, one.block, one.depth) for one in found.volumes)
    for path, socket, block, depth in cells:
        own = {one.way: one.rate for one in found.volumes if _cell(one) == (path, socket, block, depth)}
        rates = [units.rate(own[way]) if way in own else "-" for way in WAYS]
        rows.append((path, socket or "-", units.size(block), depth, *rates))
    if rows:
        yield table(("volume", "socket", "block", "depth", "read", "write", "read and write"), rows)


def _cell(one: VolumeRate) -> tuple[object, ...]:
    return one.path, one.socket, one.block, one.depth
