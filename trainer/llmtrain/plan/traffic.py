"""Bytes that collectives send, from sizes alone. Predictions and the counts of a run use the same functions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmtrain.plan.packed_format import PackedFormat


class TrafficHop(Protocol):
    """What the traffic of a hop depends on."""

    @property
    def radix(self) -> int:
        """Number of ranks."""

    @property
    def tier(self) -> str:
        """The slowest link between them."""


@dataclass(frozen=True)
class Traffic:
    """One collective. size: bytes of its larger buffer. sent: bytes that one rank sends to others. packed: whether
    they are quantized."""

    purpose: str
    op: str
    tier: str
    size: int
    sent: int
    packed: bool


# Counts the collectives that are started together.
CountTraffic = Callable[[Iterable[Traffic]], None]


def gather_traffic(
    purpose: str, hops: Sequence[TrafficHop], numel: int, element_bytes: int, packing: PackedFormat | None
) -> list[Traffic]:
    """Return the traffic of a gather of `numel` elements over `hops`, fastest first."""
    ranks = 1
    for hop in hops:
        ranks *= hop.radix
    part = numel // ranks
    gathered = packing.row_bytes(part) if packing else part * element_bytes
    found = []
    for hop in reversed(hops):
        found.append(_exchange(purpose, "all_gather", hop, gathered * hop.radix, packing))
        gathered *= hop.radix
    return found


def reduce_traffic(
    purpose: str, hops: Sequence[TrafficHop], numel: int, element_bytes: tuple[int, int], packing: PackedFormat | None
) -> list[Traffic]:
    """Return the traffic of a reduction of `numel` elements to one rank's part over `hops`, fastest first.
    element_bytes: bytes of an element on the first hop, and on the others."""
    found = []
    for hop_index, hop in enumerate(hops):
        part = numel // hop.radix
        size = hop.radix * (packing.row_bytes(part) if packing else part * element_bytes[hop_index > 0])
        found.append(_exchange(purpose, "all_to_all", hop, size, packing))
        numel = part
    return found


def _exchange(purpose: str, op: str, hop: TrafficHop, size: int, packing: PackedFormat | None) -> Traffic:
    return Traffic(purpose, op, hop.tier, size, size // hop.radix * (hop.radix - 1), packing is not None)
