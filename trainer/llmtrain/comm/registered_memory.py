"""Memory that NCCL has registered with communicators (NCCL user guide, "User Buffer Registration"): its kernels, NVLink
SHARP and network cards then read and write it without a copy. Not yet run on a GPU."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.comm.device import synchronize
from llmtrain.errors import RunFailedError


class RegisteredMemory:
    """Memory of NCCL's allocator, on this process's GPU."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """group: any that NCCL connects. Raises RunFailedError where NCCL has no such memory."""
        self._device = device
        try:
            allocator = self._backend(group).mem_allocator
        except RuntimeError:
            raise RunFailedError(
                "zero.registered is true, but NCCL has no allocator for this GPU: it needs multicast (NVLink SHARP, of "
                "H100 and later); leave it out"
            ) from None
        self._pool = torch.cuda.MemPool(allocator)
        self._groups: list[dist.ProcessGroup] = []

    def allocating(self) -> AbstractContextManager[None]:
        """Let what this thread allocates on the GPU inside the block lie in this memory."""
        return torch.cuda.use_mem_pool(self._pool)

    def register(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Register the memory with the communicators of groups."""
        for group in groups:
            self._backend(group).register_mem_pool(self._pool)
            self._groups.append(group)

    def deregister(self) -> None:
        """Take the memory from the communicators, before these end: memory that is freed while an ended one has it
        raises an error in the allocator."""
        synchronize(self._device)
        for group in self._groups:
            self._backend(group).deregister_mem_pool(self._pool)
        self._groups.clear()

    def _backend(self, group: dist.ProcessGroup) -> Any:
        backend = group._get_backend(self._device)
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch checks calls in a group around it.
        return getattr(backend, "wrapped_pg", backend)
