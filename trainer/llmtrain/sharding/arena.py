"""Memory in which buffers lie at planned offsets."""

import torch
from llmtrain_kernels.direct_io.queue import aligned_bytes
from torch import Tensor

from llmtrain.comm.device import is_cpu


def new_arena(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeroed memory: `[elements]`. On a CPU it begins at a page, so that files are read into it directly."""
    if not is_cpu(device):
        return torch.zeros(elements, dtype=dtype, device=device)
    return aligned_bytes(elements * dtype.itemsize).view(dtype).zero_()


def overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two parts of one arena share elements."""
    start, end = first.storage_offset(), first.storage_offset() + first.numel()
    return start < second.storage_offset() + second.numel() and second.storage_offset() < end
