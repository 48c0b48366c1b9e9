"""Matrix products by the faster of torch's CPU libraries. On AVX-512 CPUs from other vendors than Intel, MKL uses only
half of the vector width. oneDNN uses all of it, and is more than twice as fast in fp32."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain_kernels.operators import constant, fake, traced_operator

MIN_MULTIPLICATIONS = 1 << 22
"""Smaller products do not repay oneDNN's higher overhead per call."""


# Computes the gradient of a weight or a bias.
Product = Callable[[], Tensor]

# Takes the products for the gradients of a weight and of a bias. Returns True if it queued them for later; the backward
# pass then returns no gradients for the two.
Defer = Callable[[Product, Product], bool]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, defer: Defer | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, as `torch.nn.functional.linear`. x: `[..., in]`; weight: `[out, in]`, same dtype.

    defer: called in each backward pass.
    """
    if defer is not None or _takes_onednn(x, weight):
        return _Linear.apply(x, weight, bias, defer)
    return F.linear(x, weight, bias)


def matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `a @ b` without autograd. a: `[..., k]`; b: `[k, n]`, same dtype.

    out: buffer for the result. oneDNN ignores it and returns a new tensor.
    """
    return _onednn(a, b.t()) if _takes_onednn(a, b) else torch.matmul(a, b, out=out)


def _takes_onednn(x: Tensor, weight: Tensor) -> bool:
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return False
    return x.numel() * weight.numel() >= MIN_MULTIPLICATIONS * x.shape[-1] and onednn_is_wider()


@constant
def onednn_is_wider() -> bool:
    """Whether the CPU's vectors are wider than those that MKL uses on it."""
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


@traced_operator("product")
def _opaque(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product, opaque to torch.compile, whose own oneDNN lowering requires constant weights."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@fake("product")
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, defer: Defer | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.defer = defer
        return _onednn(x, weight, bias) if _takes_onednn(x, weight) else F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (for_x, for_weight, for_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
        # Detached: a deferred product would else keep the graph before x, and with it the stage's input and gradient.
        rows, grads, straight = x.detach().flatten(0, -2), grad.flatten(0, -2), weight.is_contiguous()
        grad_x = matmul(grad, weight) if for_x else None

        def product() -> Tensor:
            # The result has the weight's memory layout, so accumulation needs no transpose.
            return matmul(grads.t(), rows) if straight else matmul(rows.t(), grads).t()

        if ctx.defer is not None and ctx.defer(product, lambda: grads.sum(0)):
            return grad_x, None, None, None
        return grad_x, product() if for_weight else None, grads.sum(0) if for_bias else None, None
