"""Causal attention by flash-attn, torch's `scaled_dot_product_attention` or the CPU kernel."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain_kernels.attention.choice import FLASH_CHANNELS, PACKAGES, Kernel
from llmtrain_kernels.heads.op import parted
from llmtrain_kernels.native import native_functions
from llmtrain_kernels.operators import constant, fake, traced_operator
from llmtrain_kernels.rotary.op import rotated

Rotary = tuple[Tensor, Tensor]
# The least compute capability of NVIDIA's GPUs for torch's FlashAttention.
FLASH_CAPABILITY = (8, 0)
# GPUs of consumers and for inference, on which torch's FlashAttention trains no heads wider than the first number of
# channels; wider than the second one, it trains them without dropout (torch, sdp_utils.cpp).
SMALL_SHARED_MEMORY = (((8, 6), (8, 9)), ((12, 0), (12, 1)))
WIDE_HEAD, WIDER_HEAD = 192, 224
# The last version of cuDNN, 9.15.0, that torch does not take by itself for all lengths.
FAULTY_CUDNN = 91500


def joint_attention(
    qkv: Tensor,
    heads: int,
    rotary: Rotary | None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    kernel: Kernel = "torch",
) -> Tensor:
    """Apply the rotary embedding to queries and keys, then causal attention.

    qkv: `[batch, sequence, heads + 2 * kv_heads, head_dim]`, queries first, then keys, then values. Groups of
    `heads / kv_heads` consecutive query heads share one key/value head. rotary: cosine and sine, each fp32
    `[positions, 1, rotary_dim / 2]`, or None. bias: see `parted`; only without rotary. kernel: see `causal_attention`.
    Returns `[batch, sequence, heads, head_dim]`.
    """
    sequence, kv_heads = qkv.shape[1], (qkv.shape[2] - heads) // 2
    cos, sin = (None, None) if rotary is None else (rotary[0][:sequence], rotary[1][:sequence])
    if dropout == 0.0 and _suits_kernel(qkv.device.type, qkv.dtype, qkv.shape[0] * kv_heads):
        mixed: Tensor = _JointAttention.apply(qkv, cos, sin, heads)
        return mixed
    if bias is not None:
        q, k, v = parted(qkv, heads, bias)
    elif cos is not None and sin is not None:
        q, k, v = rotated(qkv, heads, cos, sin)
    else:
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
    return causal_attention(q, k, v, dropout, kernel)


def take_kernel(kernel: Kernel) -> None:
    """Let torch's attention on GPUs use only cuDNN's kernel if `kernel` is cudnn, else only torch's own kernels, in the
    whole process.

    With cudnn, a shape that cuDNN does not support raises RuntimeError; torch does not silently use a slower kernel.
    """
    cudnn, exact = kernel == "cudnn", torch.are_deterministic_algorithms_enabled()
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.backends.cuda.enable_flash_sdp(not cudnn)
    torch.backends.cuda.enable_mem_efficient_sdp(not (cudnn or exact))
    torch.backends.cuda.enable_math_sdp(not cudnn)


def takes_length(kernel: Kernel, sequence: int) -> bool:
    """Return whether torch would take a kernel by itself for sequences of this length. Older versions of cuDNN have
    faults with those that 128 does not divide (pytorch/pytorch#169849)."""
    return kernel != "cudnn" or sequence % 128 == 0 or (torch.backends.cudnn.version() or 0) > FAULTY_CUDNN


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, kernel: Kernel = "torch") -> Tensor:
    """Apply causal attention.

    q: `[batch, sequence, heads, head_dim]`. k, v: the same with `kv_heads`, which divides `heads`; groups
    of `heads / kv_heads` consecutive query heads share one key/value head. Returns a tensor like q. kernel: computes
    16-bit inputs on CUDA, for torch's own after `take_kernel`; all others use torch.
    """
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and kernel in PACKAGES:
        return _flash_attention(q, k, v, dropout, kernel)
    heads = q.shape[2]
    if k.shape[2] != heads and q.is_cuda and not _takes_groups(q.dtype, q.shape[3], dropout > 0, q.device):
        # Without a fused kernel for grouped queries, torch falls back to separate operations, which keep all scores.
        # Repeat the keys and values instead.
        k, v = (_of_each_query(x, heads) for x in (k, v))
    shared = k.shape[2] != heads
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=shared)
    return mixed.transpose(1, 2)


@constant
def _takes_groups(dtype: torch.dtype, dim: int, drops: bool, device: torch.device) -> bool:
    """Return whether a fused kernel of torch on a GPU lets query heads share keys: FlashAttention alone does."""
    narrow, capability = dtype in (torch.float16, torch.bfloat16), torch.cuda.get_device_capability(device)
    small = any(first <= capability <= last for first, last in SMALL_SHARED_MEMORY)
    refused = small and (WIDE_HEAD < dim <= WIDER_HEAD or (dim > WIDER_HEAD and drops))
    return narrow and dim <= FLASH_CHANNELS and capability >= FLASH_CAPABILITY and not refused


def _of_each_query(x: Tensor, heads: int) -> Tensor:
    """Return keys or values, `[batch, sequence, kv_heads, head_dim]`, for each of `heads` query heads."""
    return x.unsqueeze(3).expand(-1, -1, -1, heads // x.shape[2], -1).flatten(2, 3)


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, kernel: Kernel) -> Tensor:
    exact = torch.are_deterministic_algorithms_enabled()
    if kernel == "flash-attn-2":
        from flash_attn import flash_attn_func

        return flash_attn_func(q, k, v, dropout_p=dropout, causal=True, deterministic=exact)
    from flash_attn_interface import flash_attn_func

    # Early versions also return the normalizers.
    found = flash_attn_func(q, k, v, causal=True, deterministic=exact)
    return found[0] if isinstance(found, tuple) else found


def reference_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute `causal_attention` from its definition in fp64; the reference in tests."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v).transpose(1, 2)


@constant
def _suits_kernel(device: str, dtype: torch.dtype, key_heads: int) -> bool:
    # Each thread takes one key/value head of one sequence. With fewer heads than threads, threads would be idle.
    return (
        device == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and key_heads >= torch.get_num_threads()
        and _kernel() is not None
    )


@functools.cache
def _kernel() -> SimpleNamespace | None:
    return native_functions(
        "attention",
        attention_workspace="pll",
        attention_forward="p" * 6 + "l" * 8,
        attention_backward="p" * 8 + "l" * 8,
    )


def _sizes(qkv: Tensor, cos: Tensor | None, heads: int) -> tuple[int, ...]:
    # (threads, is_bf16, batch, sequence, heads, kv_heads, head_dim, rotary_dim / 2)
    batch, sequence, width, dim = qkv.shape
    half = 0 if cos is None else cos.shape[-1]
    return (
        torch.get_num_threads(),
        int(qkv.dtype == torch.bfloat16),
        batch,
        sequence,
        heads,
        (width - heads) // 2,
        dim,
        half,
    )


def _workspace(qkv: Tensor, backward: bool) -> Tensor:
    floats = torch.empty(2, dtype=torch.int64)
    _native().attention_workspace(floats.data_ptr(), qkv.shape[1], qkv.shape[3])
    return torch.empty(torch.get_num_threads() * int(floats[int(backward)]))


def _native() -> SimpleNamespace:
    kernel = _kernel()
    assert kernel is not None
    return kernel


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@traced_operator("joint_attention", device="CPU")
def _joint_attention(qkv: Tensor, cos: Tensor | None, sin: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    qkv = qkv.contiguous()
    mixed = qkv.new_empty(*qkv.shape[:2], heads, qkv.shape[3])
    log_sums = qkv.new_empty(qkv.shape[0], heads, qkv.shape[1], dtype=torch.float32)
    workspace = _workspace(qkv, backward=False)
    pointers = [_pointer(x) for x in (qkv, cos, sin, mixed, log_sums, workspace)]
    _native().attention_forward(*pointers, *_sizes(qkv, cos, heads))
    return mixed, log_sums


@traced_operator("joint_attention_backward", device="CPU")
def _joint_attention_backward(
    grad: Tensor, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, mixed: Tensor, log_sums: Tensor
) -> Tensor:
    grad, qkv = grad.contiguous(), qkv.contiguous()
    grad_qkv = torch.empty_like(qkv)
    workspace = _workspace(qkv, backward=True)
    pointers = [_pointer(x) for x in (qkv, cos, sin, mixed, log_sums, grad, grad_qkv, workspace)]
    _native().attention_backward(*pointers, *_sizes(qkv, cos, mixed.shape[2]))
    return grad_qkv


@fake("joint_attention")
def _(qkv: Tensor, cos: Tensor | None, sin: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    batch, sequence, _, dim = qkv.shape
    mixed = qkv.new_empty(batch, sequence, heads, dim)
    return mixed, qkv.new_empty(batch, heads, sequence, dtype=torch.float32)


@fake("joint_attention_backward")
def _(grad: Tensor, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, mixed: Tensor, log_sums: Tensor) -> Tensor:
    return qkv.new_empty(qkv.shape)


class _JointAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, heads: int) -> Tensor:
        mixed, log_sums = _joint_attention(qkv, cos, sin, heads)
        ctx.save_for_backward(qkv, cos, sin, mixed, log_sums)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _joint_attention_backward(grad, *ctx.saved_tensors), None, None, None
