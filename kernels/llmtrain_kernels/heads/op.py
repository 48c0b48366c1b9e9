"""Queries, keys and values as parts of one product, whose gradients are joined in one pass."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

QKV = tuple[Tensor, Tensor, Tensor]


def parted(qkv: Tensor, heads: int, bias: Tensor | None) -> QKV:
    """Return views of queries, keys and values, `[batch, sequence, heads or kv_heads, head_dim]`, on a GPU.

    qkv: `[batch, sequence, heads + 2 * kv_heads, head_dim]`. bias: `[(heads + 2 * kv_heads) * head_dim]`, which was
    added to `qkv` without autograd. The kernel that joins the three gradients also sums them over tokens, which is the
    bias's gradient.
    """
    return _Parted.apply(qkv, heads, bias)


class _Parted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, bias: Tensor | None) -> QKV:
        kv_heads = (qkv.shape[2] - heads) // 2
        ctx.sums = None if bias is None else bias.dtype
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from llmtrain_kernels.heads import triton_backend

        q, k, v = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        joined, sums = triton_backend.join_and_sum(q, k, v)
        return joined, None, None if ctx.sums is None else sums.to(ctx.sums)
