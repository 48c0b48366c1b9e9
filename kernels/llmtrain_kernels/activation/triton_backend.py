"""Exact GELU, tanh GELU, SwiGLU and their gradients on a GPU, as Triton kernels. Each makes one pass over its input.

An element of GELU moves 2 numbers in the forward pass and 3 in the backward pass; one of SwiGLU's result 3 and 5. With
a bias before GELU, programs of the backward pass process a range of columns and sum the gradient over their rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain_kernels.operators import fake, operator
from llmtrain_kernels.triton_launch import ceil_div, launch

TILE = 2048
OPTIONS = {"num_warps": 4}
# Of programs that sum: columns, rows at once, and the most programs. Their number fixes the bits of the sums.
SUMMED = {"tile": 256, "group": 8}
PROGRAMS = 1024


@operator("activation_forward")
def forward(x: Tensor, kind: str) -> Tensor:
    """Return the activation of `x`, `[rows, width]`, contiguous, fp32, bf16 or fp16.

    kind: gelu, gelu_tanh or swiglu, which maps `[rows, 2 * width]`, gate first, to `[rows, width]`.
    """
    y = _empty_result(x, kind)
    _launch(_forward, kind, y, x, y)
    return y


@fake("activation_forward")
def _(x: Tensor, kind: str) -> Tensor:
    return _empty_result(x, kind)


def _empty_result(x: Tensor, kind: str) -> Tensor:
    return x.new_empty(len(x), x.shape[1] // (2 if kind == "swiglu" else 1))


@operator("activation_backward")
def backward(x: Tensor, grad: Tensor, kind: str) -> Tensor:
    """Return the gradient of `x`. grad: of the result, contiguous and of the same dtype."""
    grad_x = torch.empty_like(x)
    _launch(_backward, kind, grad, x, grad, grad_x)
    return grad_x


@fake("activation_backward")
def _(x: Tensor, grad: Tensor, kind: str) -> Tensor:
    return torch.empty_like(x)


@operator("activation_backward_and_sums")
def backward_and_sums(x: Tensor, grad: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the gradient of `x`, and its sum over the rows, fp32 `[width]`. kind: gelu or gelu_tanh."""
    (rows, width), grad_x = x.shape, torch.empty_like(x)
    ranges = ceil_div(width, SUMMED["tile"])
    programs = min(ceil_div(rows, SUMMED["group"]), max(1, PROGRAMS // max(1, ranges)))
    partial = x.new_empty(programs, width, dtype=torch.float32)
    if x.numel():
        grid = ranges, programs
        launch(_backward_and_sums, grid, x, grad, grad_x, partial, rows, width, kind=kind, **SUMMED, **OPTIONS)
    return grad_x, partial.sum(0)


@fake("activation_backward_and_sums")
def _(x: Tensor, grad: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[1], dtype=torch.float32)


def _launch(kernel: Any, kind: str, result: Tensor, *tensors: Tensor) -> None:
    # Only SwiGLU depends on where rows begin. For other activations all elements are one row.
    rows, width = result.shape if kind == "swiglu" else (1, result.numel())
    if result.numel():
        launch(kernel, (rows * ceil_div(width, TILE),), *tensors, width, kind=kind, tile=TILE, **OPTIONS)


@triton.jit
def _row_and_columns(width: tl.tensor, tile: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Return a program's row, and its columns and which of them exist."""
    tiles = tl.cdiv(width, tile)
    columns = (tl.program_id(0) % tiles).to(tl.int64) * tile + tl.arange(0, tile)
    return (tl.program_id(0) // tiles).to(tl.int64), columns, columns < width


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh_gelu_share(x: tl.tensor) -> tl.tensor:
    """(1 + tanh(z)) / 2 is sigmoid(2z), with 2z = 2 sqrt(2 / pi) (x + 0.044715 x^3)."""
    return _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _normal_integral(x: tl.tensor) -> tl.tensor:
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _forward(x: tl.tensor, y: tl.tensor, width: tl.tensor, kind: tl.constexpr, tile: tl.constexpr) -> None:
    row, columns, inside = _row_and_columns(width, tile)
    if kind == "swiglu":
        gate = tl.load(x + row * 2 * width + columns, inside).to(tl.float32)
        value = gate * _sigmoid(gate) * tl.load(x + row * 2 * width + width + columns, inside).to(tl.float32)
    else:
        given = tl.load(x + columns, inside).to(tl.float32)
        value = given * (_tanh_gelu_share(given) if kind == "gelu_tanh" else _normal_integral(given))
    tl.store(y + row * width + columns, value.to(y.dtype.element_ty), inside)


@triton.jit
def _backward(
    x: tl.tensor, grad: tl.tensor, grad_x: tl.tensor, width: tl.tensor, kind: tl.constexpr, tile: tl.constexpr
) -> None:
    row, columns, inside = _row_and_columns(width, tile)
    above = tl.load(grad + row * width + columns, inside).to(tl.float32)
    if kind == "swiglu":
        at = row * 2 * width + columns
        gate, up = tl.load(x + at, inside).to(tl.float32), tl.load(x + at + width, inside).to(tl.float32)
        share = _sigmoid(gate)
        tl.store(grad_x + at, (above * up * share * (1.0 + gate * (1.0 - share))).to(x.dtype.element_ty), inside)
        tl.store(grad_x + at + width, (above * gate * share).to(x.dtype.element_ty), inside)
    else:
        slope = _slope(tl.load(x + columns, inside).to(tl.float32), kind)
        tl.store(grad_x + columns, (above * slope).to(x.dtype.element_ty), inside)


@triton.jit
def _backward_and_sums(
    x: tl.tensor, grad: tl.tensor, grad_x: tl.tensor, partial: tl.tensor, rows: tl.tensor, width: tl.tensor,
    kind: tl.constexpr, tile: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    columns = (tl.program_id(0) * tile + tl.arange(0, tile))[None, :]
    inside, total = columns < width, tl.zeros([group, tile], tl.float32)
    for first in range(tl.program_id(1) * group, rows, tl.num_programs(1) * group):
        own = first + tl.arange(0, group)[:, None]
        at, mask = own.to(tl.int64) * width + columns, (own < rows) & inside
        above = tl.load(grad + at, mask, 0.0).to(tl.float32)
        rounded = (above * _slope(tl.load(x + at, mask, 0.0).to(tl.float32), kind)).to(x.dtype.element_ty)
        tl.store(grad_x + at, rounded, mask)
        total += rounded.to(tl.float32)
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    tl.store(partial + tl.program_id(1) * width + column, tl.sum(total, 0), column < width)


@triton.jit
def _slope(x: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """The derivative of GELU."""
    if kind == "gelu_tanh":
        share = _tanh_gelu_share(x)
        inner = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        slope = share + x * share * (1.0 - share) * inner
    else:
        slope = _normal_integral(x) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return slope
