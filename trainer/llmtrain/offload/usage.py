"""What a rank has moved between the device's memory, the host's and files."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass
class LinkCount:
    """Bytes that a GPU and its host have copied to each other."""

    to_host: int = 0
    to_device: int = 0

    def __add__(self, other: "LinkCount") -> "LinkCount":
        """Return what both have counted."""
        return LinkCount(self.to_host + other.to_host, self.to_device + other.to_device)


@dataclass(frozen=True, kw_only=True)
class TierUsage:
    """What a rank has moved. read, written: bytes of each volume, by path (of activations in the host's memory, by
    "host"). waited: seconds that steps waited. waits: seconds that the threads which compute and load waited for each
    volume. to_host, to_device: bytes copied from a GPU and to it; 0 on CPUs. compute_waited: seconds that the main
    thread, which computes or launches what a GPU computes, waited for optimizer steps of other threads. gpu_waited:
    seconds that a GPU, which had computed all before, waited for what came from outside, and for its gathers over
    ranks; 0 on CPUs."""

    read: Mapping[str, int] = field(default_factory=dict)
    written: Mapping[str, int] = field(default_factory=dict)
    waited: float = 0.0
    waits: Mapping[str, float] = field(default_factory=dict)
    to_host: int = 0
    to_device: int = 0
    compute_waited: float = 0.0
    gpu_waited: float = 0.0

    def with_link(self, *links: LinkCount) -> "TierUsage":
        """Return the same with what links have counted."""
        to_host, to_device = sum(one.to_host for one in links), sum(one.to_device for one in links)
        return replace(self, to_host=self.to_host + to_host, to_device=self.to_device + to_device)

    def __add__(self, other: "TierUsage") -> "TierUsage":
        """Return what both have moved together."""
        read, written = Counter(self.read), Counter(self.written)
        read.update(other.read)
        written.update(other.written)
        waits = {path: self.waits.get(path, 0.0) + other.waits.get(path, 0.0) for path in {**self.waits, **other.waits}}
        to_host, to_device = self.to_host + other.to_host, self.to_device + other.to_device
        compute_waited = self.compute_waited + other.compute_waited
        return TierUsage(
            read=read,
            written=written,
            waited=self.waited + other.waited,
            waits=waits,
            to_host=to_host,
            to_device=to_device,
            compute_waited=compute_waited,
            gpu_waited=self.gpu_waited + other.gpu_waited,
        )

    def since(self, before: "TierUsage") -> dict[str, Any]:
        """Return what was moved after `before`, as a row of the metrics."""
        row: dict[str, Any] = {
            "read_bytes": {path: count - before.read.get(path, 0) for path, count in self.read.items()},
            "written_bytes": {path: count - before.written.get(path, 0) for path, count in self.written.items()},
            "wait_s": self.waited - before.waited,
            "waits_s": {path: waited - before.waits.get(path, 0.0) for path, waited in self.waits.items()},
        }
        if self.to_host or self.to_device:
            row["to_host_bytes"] = self.to_host - before.to_host
            row["to_device_bytes"] = self.to_device - before.to_device
            row["gpu_wait_s"] = self.gpu_waited - before.gpu_waited
        if self.compute_waited:
            row["compute_wait_s"] = self.compute_waited - before.compute_waited
        return row
