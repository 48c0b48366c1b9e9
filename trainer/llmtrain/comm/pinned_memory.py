"""Large memory of the host for states: pinned where a GPU copies from and to it."""

import mmap
import weakref
from contextlib import suppress

import torch
from llmtrain_data import units
from llmtrain_kernels.direct_io.queue import FILE_ALIGNMENT, aligned, aligned_bytes
from torch import Tensor

from llmtrain.errors import RunFailedError

# Bytes from which memory is pinned here and not by torch, whose allocator rounds every block up to a power of two.
LARGE = 2**24


def host_zeros(numel: int, dtype: torch.dtype, pinned: bool) -> Tensor:
    """Return zeros in the host's memory, `[numel]` of `dtype`; pinned, so that a GPU copies from and to it directly, if
    `pinned`.

    Pinned memory of LARGE bytes or more is not rounded up to a power of two, only to whole pages. It is unpinned when
    its last reference is dropped. No copy may be running then: unlike torch's own pinned memory, it is not kept until
    the streams that use it are done. Raises RunFailedError if it cannot be pinned.
    """
    nbytes = numel * dtype.itemsize
    if not pinned or nbytes < LARGE:
        return torch.zeros(numel, dtype=dtype, pin_memory=pinned)
    # Another allocation must not share its pages.
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Large pages are mapped and pinned sooner. Not every kernel has them.
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    # torch's threads map the pages on this rank's socket; the driver would map them one after another.
    memory = torch.frombuffer(pages, dtype=dtype).zero_()
    _pin(memory)
    return memory


def aligned_host_bytes(nbytes: int, pinned: bool) -> Tensor:
    """Return host memory that a `DirectQueue` can transfer: uint8 `[nbytes]`, of any content. See `host_zeros`."""
    return (
        aligned(host_zeros(nbytes + FILE_ALIGNMENT, torch.uint8, pinned), nbytes) if pinned else aligned_bytes(nbytes)
    )


def _pin(memory: Tensor) -> None:
    # ROCm's build of torch has HIP's functions under the same names.
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    # 0 is cudaHostRegisterDefault: all devices of the process may copy.
    error = runtime.cudaHostRegister(address, memory.nbytes, 0)
    if int(error):
        raise RunFailedError(
            f"{units.size(memory.nbytes)} of the host's memory could not be pinned for copies to the GPU "
            f"({runtime.cudaGetErrorString(error)}); free memory of the host, raise `ulimit -l`, offload less, or "
            "set checkpoint.async=false"
        )
    # The callback runs before the storage frees the memory. The end of the process unpins by itself.
    weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, address).atexit = False
