"""Offsets for buffers of different sizes in one buffer pool. No torch in here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class BufferPool:
    """Places buffers at offsets below `capacity`, in elements. high: the end of the highest place that was taken."""

    capacity: int
    high: int = 0
    _taken: list[tuple[int, int]] = field(default_factory=list)

    def fits(self, size: int) -> bool:
        """Whether a gap has room for a buffer of `size` elements."""
        return any(end - start >= size for start, end in self._gaps())

    def take(self, size: int, low: bool) -> int:
        """Return the offset of a buffer of `size` elements: in the lowest gap that has room for it, or in the highest.

        Where no gap has room, the buffer lies behind all others, beyond the capacity.
        """
        gaps = [gap for gap in self._gaps() if gap[1] - gap[0] >= size]
        if gaps:
            offset = gaps[0][0] if low else gaps[-1][1] - size
        else:
            offset = max([end for _, end in self._taken], default=0)
        self._taken.append((offset, offset + size))
        self._taken.sort()
        self.high = max(self.high, offset + size)
        return offset

    def give_back(self, offset: int) -> None:
        """Free the buffer at `offset`."""
        self._taken = [taken for taken in self._taken if taken[0] != offset]

    def _gaps(self) -> list[tuple[int, int]]:
        starts = [0, *(end for _, end in self._taken)]
        ends = [*(start for start, _ in self._taken), self.capacity]
        gaps = zip(starts, ends, strict=True)
        return [(start, min(end, self.capacity)) for start, end in gaps if start < min(end, self.capacity)]


def paired_size(sizes: Sequence[int]) -> int:
    """Return the elements of a buffer pool in which each buffer of `sizes` fits together with the one before it."""
    return max([first + second for first, second in pairwise(sizes)] or sizes or [0])


def paired_offsets(sizes: Sequence[int]) -> list[int]:
    """Return an offset for each buffer of a sequence, in a buffer pool of `paired_size`: at its start and at its end in
    turn, so that no buffer overlaps the one before it."""
    capacity = paired_size(sizes)
    return [capacity - size if place % 2 else 0 for place, size in enumerate(sizes)]
