"""The sum of squares of a flat range, in fp64 and in a fixed order: what the global gradient norm is made of."""

import functools
from types import SimpleNamespace

import torch
from torch import Tensor

from llmtrain_kernels.native import native_functions, takes_native

# Elements whose squares are summed together before their sum joins the total.
BLOCK = 4096


def squared_sum(x: Tensor, offset: int) -> Tensor:
    """Return the sum of squares of `x`, fp32 `[n]`, as an fp64 scalar on its device.

    offset: place of `x` in the flat buffer that it is a part of. Blocks of BLOCK elements begin at multiples of BLOCK
    of that buffer, whatever part of it is summed. On a CPU neither threads nor the instruction set change a bit.
    """
    kernel = _kernel() if takes_native(x) and x.dtype == torch.float32 else None
    if kernel is None:
        return torch.linalg.vector_norm(x, dtype=torch.float64).square()
    x = x.contiguous()
    sums = torch.zeros(-(-(offset % BLOCK + x.numel()) // BLOCK), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    kernel.squared_sum(
        x.data_ptr(), sums.data_ptr(), total.data_ptr(), x.numel(), offset % BLOCK, BLOCK, torch.get_num_threads()
    )
    return total


@functools.cache
def _kernel() -> SimpleNamespace | None:
    return native_functions("squared_sum", squared_sum="pppllll")
