"""MLP activations: exact GELU, tanh GELU (Hendrycks and Gimpel, 2016, section 2) and SwiGLU (Shazeer, 2020)."""

import functools
from types import SimpleNamespace
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain_kernels.activation.kinds import Activation
from llmtrain_kernels.native import native_functions, takes_native
from llmtrain_kernels.recomputed import recomputed
from llmtrain_kernels.triton_launch import takes_triton


def activate(x: Tensor, kind: Activation, bias: Tensor | None = None) -> Tensor:
    """Apply the activation to `[..., width]`. swiglu maps `[..., 2 * width]`, gate first, to `[..., width]`.

    bias: `[width]`, which was added to `x` without autograd. The kernel that writes the gradient of `x` sums it as the
    bias's gradient. Only for tensors that Triton takes, and not for swiglu.
    """
    if bias is not None:
        return _ActivateOnGPU.apply(x, kind, bias)
    if takes_native(x) and _kernel() is not None:
        return _Activate.apply(x, kind)
    if takes_triton(x):
        return _ActivateOnGPU.apply(x, kind, None)
    # torch's SwiGLU would keep the SiLU of the gate too.
    return recomputed(_swiglu, x) if kind == "swiglu" else reference_activate(x, kind)


def reference_activate(x: Tensor, kind: Activation) -> Tensor:
    """Compute `activate` with torch operations; the reference in tests."""
    return _swiglu(x) if kind == "swiglu" else F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@functools.cache
def _kernel() -> SimpleNamespace | None:
    return native_functions("activation", activation_forward="pplllll", activation_backward="ppplllll")


def _numbers(x: Tensor, kind: Activation) -> tuple[int, ...]:
    # (kind, rows, width of the result, is_bf16, threads)
    width = x.shape[-1] // (2 if kind == "swiglu" else 1)
    rows = x.numel() // max(1, x.shape[-1])
    return get_args(Activation).index(kind), rows, width, int(x.dtype == torch.bfloat16), torch.get_num_threads()


class _Activate(torch.autograd.Function):
    """Saves only its input for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: Activation) -> Tensor:
        kernel, x, numbers = _kernel(), x.contiguous(), _numbers(x, kind)
        assert kernel is not None
        y = x.new_empty(*x.shape[:-1], numbers[2])
        kernel.activation_forward(x.data_ptr(), y.data_ptr(), *numbers)
        ctx.save_for_backward(x)
        ctx.kind = kind
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,), kernel, grad = ctx.saved_tensors, _kernel(), grad.contiguous()
        assert kernel is not None
        grad_x = torch.empty_like(x)
        numbers = _numbers(x, ctx.kind)
        kernel.activation_backward(x.data_ptr(), grad.data_ptr(), grad_x.data_ptr(), *numbers)
        return grad_x, None


class _ActivateOnGPU(torch.autograd.Function):
    """Saves only its input for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: Activation, bias: Tensor | None) -> Tensor:
        from llmtrain_kernels.activation import triton_backend

        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.kind, ctx.backend = kind, triton_backend
        ctx.sums = None if bias is None else bias.dtype
        y = triton_backend.forward(x.view(-1, x.shape[-1]), kind)
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), grad = ctx.saved_tensors, grad.contiguous()
        rows = x.view(-1, x.shape[-1]), grad.view(-1, grad.shape[-1])
        if ctx.sums is None:
            return ctx.backend.backward(*rows, ctx.kind).view(x.shape), None, None
        grad_x, sums = ctx.backend.backward_and_sums(*rows, ctx.kind)
        return grad_x.view(x.shape), None, sums.to(ctx.sums)
