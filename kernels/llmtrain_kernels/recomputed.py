"""Cheap operations that keep only their inputs for the backward pass, and compute the rest again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return `function(*inputs)`. The backward pass computes it a second time, so it must draw no random numbers.

    torch.compile decides by itself what it keeps, so it sees the plain function.
    """
    return function(*inputs) if torch.compiler.is_compiling() else _Recomputed.apply(function, *inputs)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            result = ctx.function(*inputs)
        grads = iter(torch.autograd.grad(result, [x for x in inputs if x.requires_grad], grad))
        return None, *(next(grads) if need else None for need in needed)
