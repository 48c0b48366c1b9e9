"""Parts of memory in which buffers lie at planned offsets."""

from torch import Tensor


def overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two parts of one arena share elements."""
    start, end = first.storage_offset(), first.storage_offset() + first.numel()
    return start < second.storage_offset() + second.numel() and second.storage_offset() < end
