"""Rotary position embedding (RoFormer, Su et al., 2021, section 3.2)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain_kernels.heads.op import QKV
from llmtrain_kernels.triton_launch import takes_triton


def rotated(qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> QKV:
    """Return rotated queries and keys, and values, each `[batch, sequence, heads, head_dim]`.

    qkv: `[batch, sequence, heads + 2 * kv_heads, head_dim]`, queries first, then keys, then values. On a GPU, queries
    and keys are rotated in place, so nothing else may read it. cos, sin: see `rotate`.
    """
    if takes_triton(qkv):
        return _InPlace.apply(qkv, heads, cos, sin)
    kv_heads = (qkv.shape[2] - heads) // 2
    qk, v = qkv.split([heads + kv_heads, kv_heads], dim=2)
    # Autograd keeps what attention reads. A copy of the values frees the product that they are a view of.
    qk, v = rotate(qk, cos, sin), v.contiguous()
    q, k = qk.split([heads, kv_heads], dim=2)
    return q, k, v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `rotary_dim` channels of x (`[batch, sequence, heads, head_dim]`); return x's dtype.

    Channel i forms a pair with channel i + rotary_dim / 2. cos, sin: `[sequence, 1, rotary_dim / 2]`, fp32.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


class _InPlace(torch.autograd.Function):
    """Overwrites what a product returned and nothing saved. The three results are views of it."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> QKV:
        from llmtrain_kernels.rotary import triton_backend

        kv_heads = (qkv.shape[2] - heads) // 2
        qkv, cos, sin = _dense(qkv), cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.backend = triton_backend
        triton_backend.rotate_(qkv[:, :, : heads + kv_heads], cos, sin)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, None, None, None]:
        grads = _dense(grad_q), _dense(grad_k), _dense(grad_v)
        return ctx.backend.backward(*grads, *ctx.saved_tensors), None, None, None


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
