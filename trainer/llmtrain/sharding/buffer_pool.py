"""Buffers for gathered units and whole gradients, allocated before training and reused."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor


class BufferPool:
    """Flat buffers by size. Nothing is allocated after construction."""

    def __init__(self, sizes: Iterable[int], most: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make a buffer for each of `sizes` (elements), but at most `most` of one size."""
        self._free: dict[int, list[Tensor]] = {
            size: [torch.zeros(size, dtype=dtype, device=device) for _ in range(min(count, most))]
            for size, count in Counter(sizes).items()
        }
        self.nbytes = sum(buffer.nbytes for buffers in self._free.values() for buffer in buffers)

    def take(self, size: int) -> Tensor | None:
        """Return a buffer of `size` elements with undefined content, or None if none is free."""
        return self._free[size].pop() if self._free[size] else None

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        self._free[buffer.numel()].append(buffer)
