"""Products of matrices by whichever of torch's libraries is faster: on CPUs that are not Intel's, MKL keeps to half of
AVX-512's width, and oneDNN takes all of it, which is more than twice as fast in fp32."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LEAST = 1 << 22
"""Multiplications from which oneDNN's longer way to its kernel pays."""


# Computes a gradient.
Product = Callable[[], Tensor]

# Given the products that make the gradients of a weight and of a bias, returns whether it has taken them for later: the
# backward pass then does without.
Later = Callable[[Product, Product], bool]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, later: Later | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, as `torch.nn.functional.linear`. x: `[..., in]`; weight: `[out, in]`; one dtype.

    later: asked in each backward pass.
    """
    if later is not None or _takes_onednn(x, weight):
        return _Linear.apply(x, weight, bias, later)
    return F.linear(x, weight, bias)


def matmul(a: Tensor, b: Tensor, room: Tensor | None = None) -> Tensor:
    """Return `a @ b`, whose gradients nobody wants. a: `[..., k]`; b: `[k, n]`; one dtype.

    room: memory for the result, which is used where the library can.
    """
    return _onednn(a, b.t()) if _takes_onednn(a, b) else torch.matmul(a, b, out=room)


def _takes_onednn(x: Tensor, weight: Tensor) -> bool:
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return False
    return x.numel() * weight.numel() >= LEAST * x.shape[-1] and onednn_is_wider()


@torch.compiler.assume_constant_result
def onednn_is_wider() -> bool:
    """Whether this machine's vectors are wider than those that MKL uses on it."""
    return _is_wider()


@functools.cache
def _is_wider() -> bool:
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    try:
        about = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx512f" in about and "GenuineIntel" not in about


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.compiler.is_compiling():
        return _opaque(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@torch.library.custom_op("llmtrain::product", mutates_args=())
def _opaque(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product as torch.compile is to leave it: its own form of it wants weights that never change."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@_opaque.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: Later | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return _onednn(x, weight, bias) if _takes_onednn(x, weight) else F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (for_x, for_weight, for_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
        rows, grads, straight = x.flatten(0, -2), grad.flatten(0, -2), weight.is_contiguous()
        grad_x = matmul(grad, weight) if for_x else None

        def product() -> Tensor:
            # In the order of the weight's memory, so that whoever keeps it need not turn it round.
            return matmul(grads.t(), rows) if straight else matmul(rows.t(), grads).t()

        if ctx.later is not None and ctx.later(product, lambda: grads.sum(0)):
            return grad_x, None, None, None
        return grad_x, product() if for_weight else None, grads.sum(0) if for_bias else None, None
