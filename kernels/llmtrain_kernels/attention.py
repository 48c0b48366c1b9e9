"""Causal attention: one dispatch point for flash-attn and torch's scaled dot-product attention."""

import functools
import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor


@functools.cache
def flash_attention_available() -> bool:
    """Whether the flash-attn package is installed."""
    return importlib.util.find_spec("flash_attn") is not None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Attend causally.

    q: `[batch, sequence, heads, head_dim]`; k, v: the same with `kv_heads`, which divides `heads`: query
    heads `i * heads / kv_heads` and on share key/value head `i`. Returns a tensor like q. flash-attn runs
    16-bit inputs on CUDA (FlashAttention-2); everything else goes to torch.
    """
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and flash_attention_available():
        from flash_attn import flash_attn_func

        return flash_attn_func(q, k, v, dropout_p=dropout, causal=True)
    shared = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=shared)
    return mixed.transpose(1, 2)


def reference_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The textbook form of `causal_attention`, in fp64, that it is tested against."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v).transpose(1, 2)
