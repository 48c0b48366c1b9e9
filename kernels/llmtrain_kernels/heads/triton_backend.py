"""The gradient of queries, keys and values as one tensor, with its sum over tokens, as a Triton kernel.

A program copies a range of columns of one of the three, for some tokens after each other, so each number is read once
and written once. torch adds the sums of programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain_kernels.operators import fake, operator
from llmtrain_kernels.triton_launch import ceil_div, empty_joined, launch

# Columns of a program, tokens at once, and the most programs. Their number fixes the bits of the sums.
CONSTANTS = {"tile": 256, "group": 8}
OPTIONS = {"num_warps": 4}
PROGRAMS = 1024


@operator("join_and_sum")
def join_and_sum(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the three gradients joined along heads, `[batch, sequence, heads + 2 * kv_heads, head_dim]`, and the sum
    over batch and sequence, fp32 `[(heads + 2 * kv_heads) * head_dim]`.

    The three are `[batch, sequence, heads or kv_heads, head_dim]` with stride 1 within heads.
    """
    joined = empty_joined(grad_q, grad_k)
    batch, sequence, heads, dim = grad_q.shape
    tokens, width, kv_heads = batch * sequence, joined.shape[2] * dim, grad_k.shape[2]
    ranges = ceil_div(heads * dim, CONSTANTS["tile"])
    programs = min(ceil_div(tokens, CONSTANTS["group"]), max(1, PROGRAMS // max(1, 3 * ranges)))
    partial = joined.new_empty(programs, width, dtype=torch.float32)
    if joined.numel():
        strides = (*grad_q.stride()[:3], *grad_k.stride()[:3], *grad_v.stride()[:3])
        launch(
            _join, (ranges, programs, 3), grad_q, grad_k, grad_v, joined, partial, *strides, tokens, sequence, heads,
            kv_heads, dim=dim, **CONSTANTS, **OPTIONS,
        )  # fmt: skip
    return joined, partial.sum(0)


@fake("join_and_sum")
def _(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, Tensor]:
    joined = empty_joined(grad_q, grad_k)
    return joined, joined.new_empty(joined.shape[2] * joined.shape[3], dtype=torch.float32)


# Of 1, Triton would make a constant, and two branches would differ in the type of what they compute of it.
@triton.jit(do_not_specialize=["heads", "kv_heads"])
def _join(
    grad_q: tl.tensor, grad_k: tl.tensor, grad_v: tl.tensor, joined: tl.tensor, partial: tl.tensor, q_batch: tl.tensor,
    q_token: tl.tensor, q_head: tl.tensor, k_batch: tl.tensor, k_token: tl.tensor, k_head: tl.tensor,
    v_batch: tl.tensor, v_token: tl.tensor, v_head: tl.tensor, tokens: tl.tensor, sequence: tl.tensor,
    heads: tl.tensor, kv_heads: tl.tensor, dim: tl.constexpr, tile: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    part, width = tl.program_id(2), (heads + 2 * kv_heads) * dim
    if part == 0:
        _copy(grad_q, q_batch, q_token, q_head, joined, partial, heads, tokens, sequence, dim, width, tile, group)
    elif part == 1:
        to = heads * dim
        _copy(
            grad_k, k_batch, k_token, k_head, joined + to, partial + to, kv_heads, tokens, sequence, dim, width, tile,
            group,
        )  # fmt: skip
    else:
        to = (heads + kv_heads) * dim
        _copy(
            grad_v, v_batch, v_token, v_head, joined + to, partial + to, kv_heads, tokens, sequence, dim, width, tile,
            group,
        )  # fmt: skip


@triton.jit
def _copy(
    x: tl.tensor, batch_stride: tl.tensor, token_stride: tl.tensor, head_stride: tl.tensor, to: tl.tensor,
    partial: tl.tensor, heads: tl.tensor, tokens: tl.tensor, sequence: tl.tensor, dim: tl.constexpr, width: tl.tensor,
    tile: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    """Copy a range of columns of `x` to rows of `width` at `to`, and store its sum at `partial`."""
    columns = (tl.program_id(0) * tile + tl.arange(0, tile))[None, :]
    inside, total = columns < heads * dim, tl.zeros([group, tile], tl.float32)
    x += (columns // dim) * head_stride + columns % dim
    for first in range(tl.program_id(1) * group, tokens, tl.num_programs(1) * group):
        own = (first + tl.arange(0, group)[:, None]).to(tl.int64)
        mask = (own < tokens) & inside
        value = tl.load(x + (own // sequence) * batch_stride + (own % sequence) * token_stride, mask, 0.0)
        tl.store(to + own * width + columns, value, mask)
        total += value.to(tl.float32)
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    tl.store(partial + tl.program_id(1) * width + column, tl.sum(total, 0), column < heads * dim)
