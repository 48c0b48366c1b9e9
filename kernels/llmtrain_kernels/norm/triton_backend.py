"""RMSNorm (Zhang and Sennrich, 2019, section 4) and LayerNorm (Ba et al., 2016, section 3) on a GPU, as Triton kernels
that also add what a residual connection adds: to the input before, and to its gradient after.

A program processes several rows at once, and some rows after each other, so that it reads the weight once. Each row is
read once and kept in registers. A program sums the gradient of the weight over its rows; torch adds these sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain_kernels.operators import fake, operator
from llmtrain_kernels.triton_launch import ceil_div, launch, power_of_2_from

# Elements of a program's rows at once, of a thread, and of the widest row.
ELEMENTS, PER_WARP, WIDEST = 4096, 512, 8192
# The most programs. In the backward pass each program writes a row of sums, so their number fixes the bits of the sums.
FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 512, 256


def tile_constants(width: int) -> dict[str, int]:
    """Return the constants of both kernels. tile: elements of a row; group: rows at once; both powers of 2."""
    tile = power_of_2_from(width)
    group = max(1, ELEMENTS // tile)
    return {"tile": tile, "group": group, "num_warps": max(1, tile * group // PER_WARP)}


@operator("norm_forward")
def forward(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of `x` and `added` (`[0]` without the latter), its norm, and its statistics.

    x, added: `[rows, width]`, contiguous, fp32, bf16 or fp16. weight, bias: `[width]`, of the same dtype; without a
    bias, RMSNorm is computed, else LayerNorm. The statistics are fp32: RMSNorm's inverse root mean squares, `[1,
    rows]`, or LayerNorm's means and inverse deviations, `[2, rows]`.
    """
    total, y, statistics = _results(x, added, bias)
    (rows, width), constants = x.shape, tile_constants(x.shape[1])
    if x.numel():
        programs = min(ceil_div(rows, constants["group"]), FORWARD_PROGRAMS)
        launch(_forward, (programs,), x, added, weight, bias, total, y, statistics, eps, rows, width, **constants)
    return total, y, statistics


@fake("norm_forward")
def _(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _results(x, added, bias)


def _results(x: Tensor, added: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(0) if added is None else torch.empty_like(x)
    return total, torch.empty_like(x), x.new_empty(1 if bias is None else 2, len(x), dtype=torch.float32)


@operator("norm_backward")
def backward(
    total: Tensor, weight: Tensor, statistics: Tensor, grad: Tensor, above: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the sum, and that of the weight and, for LayerNorm, the bias: fp32 `[1 or 2, width]`.

    total: what `forward` normalized, `[rows, width]`. grad: gradient of the normalized sum. above: gradient of the sum
    itself, to which the norm's part is added. Both are like `total`.
    """
    (rows, width), constants = total.shape, tile_constants(total.shape[1])
    programs = min(ceil_div(rows, constants["group"]), BACKWARD_PROGRAMS)
    grad_x, partial = torch.empty_like(total), statistics.new_empty(len(statistics), programs, width)
    if total.numel():
        centered = len(statistics) == 2
        launch(
            _backward, (programs,), total, weight, statistics, grad, above, grad_x, partial, rows, width,
            centered=centered, **constants,
        )  # fmt: skip
    return grad_x, partial.sum(1)


@fake("norm_backward")
def _(total: Tensor, weight: Tensor, statistics: Tensor, grad: Tensor, above: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(total), statistics.new_empty(len(statistics), total.shape[1])


@triton.jit
def _forward(
    x: tl.tensor, added: tl.tensor, weight: tl.tensor, bias: tl.tensor, total: tl.tensor, y: tl.tensor,
    statistics: tl.tensor, eps: tl.tensor, rows: tl.tensor, width: tl.tensor, tile: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    columns = tl.arange(0, tile)[None, :]
    inside = columns < width
    scale = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    if bias is not None:
        shift = tl.load(bias + columns, inside, 0.0).to(tl.float32)
    for first in range(tl.program_id(0) * group, rows, tl.num_programs(0) * group):
        own = first + tl.arange(0, group)[:, None]
        there = own < rows
        at, mask = own.to(tl.int64) * width + columns, there & inside
        values = tl.load(x + at, mask, 0.0).to(tl.float32)
        if added is not None:
            # The backward pass and the next layers read the rounded sum.
            rounded = (values + tl.load(added + at, mask, 0.0).to(tl.float32)).to(x.dtype.element_ty)
            tl.store(total + at, rounded, mask)
            values = rounded.to(tl.float32)
        if bias is not None:
            mean = tl.sum(values, 1, keep_dims=True) / width
            tl.store(statistics + own, mean, there)
            values = tl.where(inside, values - mean, 0.0)
        inverse = tl.rsqrt(tl.sum(values * values, 1, keep_dims=True) / width + eps)
        result = values * inverse * scale
        if bias is not None:
            tl.store(statistics + rows + own, inverse, there)
            result += shift
        else:
            tl.store(statistics + own, inverse, there)
        tl.store(y + at, result.to(y.dtype.element_ty), mask)


@triton.jit
def _backward(
    total: tl.tensor, weight: tl.tensor, statistics: tl.tensor, grad: tl.tensor, above: tl.tensor, grad_x: tl.tensor,
    partial: tl.tensor, rows: tl.tensor, width: tl.tensor, centered: tl.constexpr, tile: tl.constexpr,
    group: tl.constexpr,
) -> None:  # fmt: skip
    columns = tl.arange(0, tile)[None, :]
    inside = columns < width
    scale = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    of_weight, of_bias = tl.zeros([group, tile], tl.float32), tl.zeros([group, tile], tl.float32)
    for first in range(tl.program_id(0) * group, rows, tl.num_programs(0) * group):
        own = first + tl.arange(0, group)[:, None]
        there = own < rows
        at, mask = own.to(tl.int64) * width + columns, there & inside
        normal = tl.load(total + at, mask, 0.0).to(tl.float32)
        slope = tl.load(grad + at, mask, 0.0).to(tl.float32)
        if centered:
            normal -= tl.load(statistics + own, there, 0.0)
            inverse = tl.load(statistics + rows + own, there, 0.0)
            of_bias += slope
        else:
            inverse = tl.load(statistics + own, there, 0.0)
        # Lanes beyond the row have no slope.
        normal *= inverse
        of_weight += slope * normal
        slope *= scale
        along = tl.sum(slope * normal, 1, keep_dims=True) / width
        if centered:
            slope -= tl.sum(slope, 1, keep_dims=True) / width
        slope = (slope - normal * along) * inverse
        if above is not None:
            slope += tl.load(above + at, mask, 0.0).to(tl.float32)
        tl.store(grad_x + at, slope.to(grad_x.dtype.element_ty), mask)
    elements = tl.program_id(0) * width + tl.arange(0, tile)
    within = tl.arange(0, tile) < width
    tl.store(partial + elements, tl.sum(of_weight, 0), within)
    if centered:
        tl.store(partial + tl.num_programs(0) * width + elements, tl.sum(of_bias, 0), within)
