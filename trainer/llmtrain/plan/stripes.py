"""How regions of bytes are striped over volumes. No torch in here."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from llmtrain.plan.placement import PAGE


@dataclass(frozen=True)
class Stripe:
    """A range of a file. first: the byte of the region that is stored at `offset`."""

    volume: int
    offset: int
    first: int
    nbytes: int


def stripes(regions: Sequence[int], bandwidths: Sequence[float]) -> list[list[Stripe]]:
    """Split each region into at most one part per volume, so that the bytes of all regions so far are divided in
    proportion to the volumes' bandwidths, up to whole pages. Return the parts of each region. Each region begins on
    another volume: what lies at the same offset of several regions, as the masters of buckets do, is on all volumes.

    regions: bytes of each, whole pages. bandwidths: those of the volumes, relative.
    """
    found, ends = [], [0] * len(bandwidths)
    for region, sizes in enumerate(striped(regions, bandwidths)):
        order = [(region + number) % len(bandwidths) for number in range(len(bandwidths))]
        firsts = accumulate((sizes[volume] for volume in order), initial=0)
        parts = ((volume, ends[volume], first, sizes[volume]) for volume, first in zip(order, firsts, strict=False))
        found.append([Stripe(*one) for one in parts if one[3]])
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    return found


def striped(regions: Iterable[int], bandwidths: Sequence[float]) -> Iterator[list[int]]:
    """Yield the bytes of each region that lie on each volume. regions, bandwidths: see `stripes`."""
    if len(bandwidths) == 1:
        # There may be hundreds of thousands of regions.
        yield from ([nbytes] for nbytes in regions)
        return
    ends, total, together = [0] * len(bandwidths), 0, sum(bandwidths)
    for nbytes in regions:
        total += nbytes
        wanted = [total * one / together - end for one, end in zip(bandwidths, ends, strict=True)]
        sizes = _pages(wanted, nbytes)
        yield sizes
        for volume, size in enumerate(sizes):
            ends[volume] += size


def _pages(wanted: Sequence[float], nbytes: int) -> list[int]:
    """Return whole pages of `nbytes` in all, near `wanted`, which may be negative."""
    sizes = [max(0, int(share)) // PAGE * PAGE for share in wanted]
    while (missing := nbytes - sum(sizes)) != 0:
        lacks = [share - size for share, size in zip(wanted, sizes, strict=True)]
        if missing > 0:
            sizes[lacks.index(max(lacks))] += PAGE
        else:
            nonempty = [volume for volume, size in enumerate(sizes) if size]
            sizes[min(nonempty, key=lambda volume: lacks[volume])] -= PAGE
    return sizes
