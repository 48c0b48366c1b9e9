"""Offsets for buffers of different sizes in one buffer pool. No torch in here."""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class BufferPool:
    """Places buffers at offsets below `capacity`, in elements. high: the highest end of a buffer so far."""

    capacity: int
    high: int = 0
    _ends: dict[int, int] = field(default_factory=dict)
    # The free ranges below the capacity, in order. A step takes and gives back very often.
    _gaps: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._gaps = [(0, self.capacity)] if self.capacity else []

    def fits(self, size: int) -> bool:
        """Whether a gap has room for a buffer of `size` elements."""
        return any(end - start >= size for start, end in self._gaps)

    def take(self, size: int, low: bool) -> int:
        """Return the offset of a buffer of `size` elements: in the lowest gap that has room for it, or in the highest.

        Where no gap has room, the buffer lies behind all others, beyond the capacity.
        """
        gaps = [gap for gap in self._gaps if gap[1] - gap[0] >= size]
        if gaps:
            start, end = gap = gaps[0] if low else gaps[-1]
            offset = start if low else end - size
            left = (offset + size, end) if low else (start, offset)
            index = self._gaps.index(gap)
            self._gaps[index : index + 1] = [left] if left[0] < left[1] else []
        else:
            offset = max(self._ends.values(), default=0)
            # It may begin in the last gap.
            self._gaps = [(start, min(end, offset)) for start, end in self._gaps if start < offset]
        self._ends[offset] = offset + size
        self.high = max(self.high, offset + size)
        return offset

    def give_back(self, offset: int) -> None:
        """Free the buffer at `offset`."""
        start, end = offset, min(self._ends.pop(offset), self.capacity)
        if start >= end:
            return
        for gap in [gap for gap in self._gaps if gap[1] == start or gap[0] == end]:
            self._gaps.remove(gap)
            start, end = min(start, gap[0]), max(end, gap[1])
        insort(self._gaps, (start, end))


def paired_size(sizes: Sequence[int]) -> int:
    """Return the elements of a buffer pool in which each buffer of `sizes` fits together with the one before it."""
    return max([first + second for first, second in pairwise(sizes)] or sizes or [0])


def paired_offsets(sizes: Sequence[int]) -> list[int]:
    """Return an offset for each buffer of a sequence, in a buffer pool of `paired_size`: at its start and at its end in
    turn, so that no buffer overlaps the one before it."""
    capacity = paired_size(sizes)
    return [capacity - size if index % 2 else 0 for index, size in enumerate(sizes)]
