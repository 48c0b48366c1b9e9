"""Buffers at planned offsets of one buffer pool."""

from torch import Tensor


def views_overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two one-dimensional views of one buffer pool, of its dtype, share elements."""
    start, end = first.storage_offset(), first.storage_offset() + first.numel()
    return start < second.storage_offset() + second.numel() and second.storage_offset() < end
