"""Gradients of many parameters, added to a flat sum by one Triton kernel.

A program processes a tile of the flat range, and takes each parameter's part of it. Each gradient is read once, each
element of the sum written once, and read once unless it is replaced: with 16-bit gradients and an fp32 sum, 6 or 10
bytes for each element.
"""

import triton
import triton.language as tl
from torch import Tensor

from llmtrain_kernels.operators import fake, operator
from llmtrain_kernels.triton_launch import ceil_div, launch

TILE = 2048
OPTIONS = {"num_warps": 4}


@operator("accumulate", writes=("flat",))
def accumulate(flat: Tensor, starts: list[int], gradients: list[Tensor], overwrite: bool) -> None:
    """Add each gradient to the elements of `flat` from its start on, or replace them.

    flat: fp32, bf16 or fp16 `[n]`, contiguous. starts: ascending. gradients: contiguous, of one dtype; no two reach the
    same elements.
    """
    parts = [(start, one) for start, one in zip(starts, gradients, strict=True) if one.numel()]
    if not parts:
        return
    # Tiles begin at a multiple of their size, so that accesses to the sum are aligned.
    first = parts[0][0] // TILE
    last = ceil_div(parts[-1][0] + parts[-1][1].numel(), TILE)
    sizes = tuple(one.numel() for _, one in parts)
    launch(
        _accumulate, (last - first,), flat, tuple(one for _, one in parts), tuple(start for start, _ in parts), sizes,
        first, overwrite=overwrite, tile=TILE, **OPTIONS,
    )  # fmt: skip


@fake("accumulate")
def _(flat: Tensor, starts: list[int], gradients: list[Tensor], overwrite: bool) -> None:
    return None


@triton.jit
def _accumulate(
    flat: tl.tensor, gradients: tl.tuple, starts: tl.tuple, sizes: tl.tuple, first: tl.tensor, overwrite: tl.constexpr,
    tile: tl.constexpr,
) -> None:  # fmt: skip
    begin = (tl.program_id(0) + first).to(tl.int64) * tile
    lanes = tl.arange(0, tile)
    for one in tl.static_range(len(gradients)):
        # Where the tile lies in the parameter.
        offset = begin - starts[one]
        if (offset < sizes[one]) & (offset + tile > 0):
            at = offset + lanes
            mask = (at >= 0) & (at < sizes[one])
            value = tl.load(gradients[one] + at, mask, eviction_policy="evict_first").to(tl.float32)
            if not overwrite:
                value += tl.load(flat + begin + lanes, mask).to(tl.float32)
            tl.store(flat + begin + lanes, value.to(flat.dtype.element_ty), mask)
