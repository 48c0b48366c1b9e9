"""Rotary position embedding on a GPU, in place, as Triton kernels. The forward pass equals `op.rotate` bit for bit.

A program processes the heads of one token, so that it reads the token's cosines and sines once. The forward pass moves
two numbers per channel that is rotated. The backward pass collects the gradients of queries, keys and values in the
memory of one, which is the gradient of their product, and moves two numbers per channel.
"""

import triton
import triton.language as tl
from torch import Tensor

from llmtrain_kernels.operators import fake, operator
from llmtrain_kernels.triton_launch import empty_joined, launch, power_of_2_from

# Elements of a tile: some heads, with a power of 2 of channels.
ELEMENTS = 2048
# No fused multiply-add: products and sums round separately, as torch's operations do.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@operator("rotate_", writes=("x",))
def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first channels of `x` (`[batch, sequence, heads, head_dim]`, stride 1 within heads) in place.

    cos, sin: fp32 `[sequence, 1, half of these channels]`, contiguous.
    """
    batch, sequence, heads, _ = x.shape
    if x.numel() and cos.shape[-1]:
        constants = tile_constants(heads, cos.shape[-1], 2 * cos.shape[-1])
        launch(_rotate, (batch * sequence,), x, cos, sin, *x.stride()[:3], sequence, heads, **constants, **OPTIONS)


@fake("rotate_")
def _(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    return None


@operator("rotary_backward")
def backward(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient of the product of queries, keys and values, `[batch, sequence, heads + 2 * kv_heads,
    head_dim]`. The gradients of the three have stride 1 within heads."""
    grad = empty_joined(grad_q, grad_k)
    batch, sequence, heads, dim = grad_q.shape
    if grad.numel():
        strides = (*grad_q.stride()[:3], *grad_k.stride()[:3], *grad_v.stride()[:3])
        constants = tile_constants(heads, cos.shape[-1], dim) | {"dim": dim, "whole": power_of_2_from(dim)}
        launch(
            _collect, (batch * sequence, 3), grad_q, grad_k, grad_v, grad, cos, sin, *strides, sequence, heads,
            grad_k.shape[2], **constants, **OPTIONS,
        )  # fmt: skip
    return grad


@fake("rotary_backward")
def _(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return empty_joined(grad_q, grad_k)


def tile_constants(heads: int, half: int, channels: int) -> dict[str, int]:
    """Return the constants of both kernels. half: pairs of channels that are rotated; tile: the same, rounded up to a
    power of 2. channels: the channels of a head that the kernel moves. group: heads at once."""
    group = max(1, ELEMENTS // power_of_2_from(channels))
    return {"half": half, "tile": power_of_2_from(half), "group": min(power_of_2_from(heads), group)}


@triton.jit
def _turn(
    x: tl.tensor, to: tl.tensor, cos: tl.tensor, sin: tl.tensor, mask: tl.tensor, half: tl.constexpr
) -> None:  # fmt: skip
    """Rotate pairs at pointers `x`, and write them to the pointers `to`."""
    first, second = tl.load(x, mask).to(tl.float32), tl.load(x + half, mask).to(tl.float32)
    kind = to.dtype.element_ty
    tl.store(to, (first * cos - second * sin).to(kind), mask)
    tl.store(to + half, (second * cos + first * sin).to(kind), mask)


@triton.jit
def _rotate(
    x: tl.tensor, cos: tl.tensor, sin: tl.tensor, batch_stride: tl.tensor, token_stride: tl.tensor,
    head_stride: tl.tensor, sequence: tl.tensor, heads: tl.tensor, half: tl.constexpr, tile: tl.constexpr,
    group: tl.constexpr,
) -> None:  # fmt: skip
    one, token = (tl.program_id(0) // sequence).to(tl.int64), (tl.program_id(0) % sequence).to(tl.int64)
    channels = tl.arange(0, tile)[None, :]
    inside = channels < half
    cosine, sine = tl.load(cos + token * half + channels, inside), tl.load(sin + token * half + channels, inside)
    x += one * batch_stride + token * token_stride
    for first in range(0, heads, group):
        head = first + tl.arange(0, group)[:, None]
        pointers = x + head * head_stride + channels
        _turn(pointers, pointers, cosine, sine, (head < heads) & inside, half)


@triton.jit
def _collect(
    grad_q: tl.tensor, grad_k: tl.tensor, grad_v: tl.tensor, grad: tl.tensor, cos: tl.tensor, sin: tl.tensor,
    q_batch: tl.tensor, q_token: tl.tensor, q_head: tl.tensor, k_batch: tl.tensor, k_token: tl.tensor,
    k_head: tl.tensor, v_batch: tl.tensor, v_token: tl.tensor, v_head: tl.tensor, sequence: tl.tensor,
    heads: tl.tensor, kv_heads: tl.tensor, half: tl.constexpr, tile: tl.constexpr, group: tl.constexpr,
    dim: tl.constexpr, whole: tl.constexpr,
) -> None:  # fmt: skip
    one, token = (tl.program_id(0) // sequence).to(tl.int64), (tl.program_id(0) % sequence).to(tl.int64)
    part = tl.program_id(1)
    to = grad + tl.program_id(0).to(tl.int64) * (heads + 2 * kv_heads) * dim
    if part == 0:
        _part(
            grad_q + one * q_batch + token * q_token, to, q_head, heads, cos + token * half, sin + token * half, half,
            tile, group, dim, whole,
        )  # fmt: skip
    elif part == 1:
        _part(
            grad_k + one * k_batch + token * k_token, to + heads * dim, k_head, kv_heads, cos + token * half,
            sin + token * half, half, tile, group, dim, whole,
        )  # fmt: skip
    else:
        _part(
            grad_v + one * v_batch + token * v_token, to + (heads + kv_heads) * dim, v_head, kv_heads, cos, sin, 0,
            tile, group, dim, whole,
        )  # fmt: skip


@triton.jit
def _part(
    x: tl.tensor, to: tl.tensor, head_stride: tl.tensor, heads: tl.tensor, cos: tl.tensor, sin: tl.tensor,
    half: tl.constexpr, tile: tl.constexpr, group: tl.constexpr, dim: tl.constexpr, whole: tl.constexpr,
) -> None:  # fmt: skip
    """Write heads to contiguous memory; rotate the first channels back, and copy the others."""
    channels, all_channels = tl.arange(0, tile)[None, :], tl.arange(0, whole)[None, :]
    inside, outside = channels < half, (all_channels >= 2 * half) & (all_channels < dim)
    if half > 0:
        cosine, sine = tl.load(cos + channels, inside), tl.load(sin + channels, inside)
    for first in range(0, heads, group):
        head = first + tl.arange(0, group)[:, None]
        if half > 0:
            mask = (head < heads) & inside
            _turn(x + head * head_stride + channels, to + head * dim + channels, cosine, -sine, mask, half)
        if 2 * half < dim:
            mask = (head < heads) & outside
            tl.store(to + head * dim + all_channels, tl.load(x + head * head_stride + all_channels, mask), mask)
