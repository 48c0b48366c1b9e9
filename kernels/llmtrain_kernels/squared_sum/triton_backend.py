"""Partial sums of squares on a GPU, as a Triton kernel. The bits of each block equal those of `cpu.cpp`.

A program sums a few blocks. A thread has one of the 16 lanes of a block, to which it adds in order. Each number is read
once: 4 bytes per fp32 element.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain_kernels.operators import fake, operator
from llmtrain_kernels.triton_launch import ceil_div, launch

# Blocks of a program, and the order of additions in a block, as in squares.h.
GROUP, LANES = 8, 16
# Numbers that a thread loads before it adds them.
AHEAD = 16
OPTIONS = {"num_warps": GROUP * LANES // 32}


@operator("squared_sum")
def block_sums(x: Tensor, first: int, block: int) -> Tensor:
    """Return the sum of squares of each block that `x` (fp32, bf16 or fp16 `[n]`, contiguous) touches, fp64.

    first: position of x[0] in its block. block: elements of a block, a multiple of 256.
    """
    sums = x.new_empty(-(-(first + x.numel()) // block) if x.numel() else 0, dtype=torch.float64)
    if len(sums):
        launch(
            _squares, (ceil_div(len(sums), GROUP),), x, sums, first, x.numel(), len(sums), block, group=GROUP,
            lanes=LANES, ahead=AHEAD, **OPTIONS,
        )  # fmt: skip
    return sums


@fake("squared_sum")
def _(x: Tensor, first: int, block: int) -> Tensor:
    return x.new_empty(-(-(first + x.numel()) // block) if x.numel() else 0, dtype=torch.float64)


@triton.jit
def _squares(
    x: tl.tensor, sums: tl.tensor, first: tl.tensor, numel: tl.tensor, blocks: tl.tensor, block: tl.tensor,
    group: tl.constexpr, lanes: tl.constexpr, ahead: tl.constexpr,
) -> None:  # fmt: skip
    own = tl.program_id(0).to(tl.int64) * group + tl.arange(0, group)
    starts = tl.maximum(own * block - first, 0)
    sizes = tl.minimum((own + 1) * block - first, numel) - starts
    pairs = tl.zeros([group, lanes], tl.float64)
    lane = tl.arange(0, lanes)[None, :]
    for row in range(0, block // lanes, ahead):
        for one in tl.static_range(ahead):
            columns = (row + one) * lanes + lane
            numbers = tl.load(x + starts[:, None] + columns, columns < sizes[:, None], 0.0).to(tl.float64)
            pairs += numbers * numbers
    # Lane i and lane i + 8, then i and i + 4, and so on.
    for halving in tl.static_range(4):
        pairs = tl.sum(tl.reshape(pairs, [group, 2, lanes >> (halving + 1)]), 1)
    tl.store(sums + own, tl.reshape(pairs, [group]), own < blocks)
