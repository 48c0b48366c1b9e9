"""Memory that NCCL has registered with communicators (NCCL user guide, "User Buffer Registration"): its kernels, NVLink
SHARP and network cards then read and write it without a copy. Not yet run on a GPU."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist


class RegisteredMemory:
    """Memory of NCCL's allocator, on this process's GPU."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """group: any that NCCL connects."""
        self._device = device
        self._pool = torch.cuda.MemPool(self._backend(group).mem_allocator)

    def allocating(self) -> AbstractContextManager[None]:
        """Let what this thread allocates on the GPU inside the block lie in this memory."""
        return torch.cuda.use_mem_pool(self._pool)

    def register(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Register the memory with the communicators of groups."""
        for group in groups:
            self._backend(group).register_mem_pool(self._pool)

    def _backend(self, group: dist.ProcessGroup) -> Any:
        return group._get_backend(self._device)
