"""What a rank has moved between the device's memory, the host's and files."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TierUsage:
    """What a rank has moved. read, written: bytes of each volume, by path. waited: seconds that steps waited."""

    read: Mapping[str, int] = field(default_factory=dict)
    written: Mapping[str, int] = field(default_factory=dict)
    waited: float = 0.0

    def __add__(self, other: "TierUsage") -> "TierUsage":
        """Return what both have moved together."""
        read, written = Counter(self.read), Counter(self.written)
        read.update(other.read)
        written.update(other.written)
        return TierUsage(read, written, self.waited + other.waited)

    def since(self, before: "TierUsage") -> dict[str, Any]:
        """Return what was moved after `before`, as a row of the metrics."""
        return {
            "read_bytes": {path: count - before.read.get(path, 0) for path, count in self.read.items()},
            "written_bytes": {path: count - before.written.get(path, 0) for path, count in self.written.items()},
            "wait_s": self.waited - before.waited,
        }
