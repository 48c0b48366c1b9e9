"""The sum of squares of a flat range, in fp64 and in a fixed order, for the global gradient norm."""

import functools
from types import SimpleNamespace

import torch
from torch import Tensor

from llmtrain_kernels.native import native_functions, takes_native
from llmtrain_kernels.triton_launch import takes_triton

# Each block of this many elements has a partial sum. The total adds the partial sums in order.
SQUARES_BLOCK = 4096


def squared_sum(x: Tensor, offset: int) -> Tensor:
    """Return the sum of squares of `x`, fp32, bf16 or fp16 `[n]`, as an fp64 scalar on its device.

    offset: position of `x` in its flat buffer. Blocks start at multiples of BLOCK in that buffer, not in `x`. On a CPU
    the result is bit-identical for any number of threads and any instruction set, but for fp16, which has no kernel
    there. On a GPU the blocks have the same bits, and their total is within the rounding of fp64.
    """
    found = _sums(x, offset)
    return torch.linalg.vector_norm(x, dtype=torch.float64).square() if found is None else found[1]


def squared_blocks(x: Tensor, offset: int) -> list[float]:
    """Return the partial sums that `squared_sum` adds in order, one for each block that `x` touches."""
    found = _sums(x, offset)
    return [float(squared_sum(x, offset))] if found is None else found[0].tolist()


def _sums(x: Tensor, offset: int) -> tuple[Tensor, Tensor] | None:
    """Return the blocks' sums and their total, fp64; None without a kernel."""
    if takes_triton(x):
        from llmtrain_kernels.squared_sum import triton_backend

        blocks = triton_backend.block_sums(x.contiguous(), offset % SQUARES_BLOCK, SQUARES_BLOCK)
        return blocks, blocks.sum()
    kernel = _kernel() if takes_native(x) else None
    if kernel is None:
        return None
    x = x.contiguous()
    sums = torch.zeros(-(-(offset % SQUARES_BLOCK + x.numel()) // SQUARES_BLOCK), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    numbers = (x.numel(), offset % SQUARES_BLOCK, SQUARES_BLOCK, torch.get_num_threads())
    kernel.squared_sum(x.data_ptr(), x.dtype == torch.bfloat16, sums.data_ptr(), total.data_ptr(), *numbers)
    return sums, total


@functools.cache
def _kernel() -> SimpleNamespace | None:
    return native_functions("squared_sum", squared_sum="plppllll")
