"""Output projection and cross-entropy in one operation, a few rows at a time, so that the logits of a whole
microbatch never exist. The gradients are made in the forward pass while a chunk's logits are at hand: they need
no second projection, and only the loss's own scale is applied in the backward pass."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of one chunk's fp32 logits: small enough to stay near the cache on a CPU, large enough to fill a GPU.
CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 28}


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy (fp32 scalar) of the logits `x @ weight.T`.

    x: `[tokens, hidden]`; weight: `[vocab, hidden]`, same dtype; targets: int64 `[tokens]`.
    """
    rows = max(1, CHUNK_ELEMENTS.get(x.device.type, 1 << 24) // weight.shape[0])
    return _LinearCrossEntropy.apply(x, weight, targets, rows, torch.is_grad_enabled())


def reference_linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The plain form of `linear_cross_entropy` that it is tested against."""
    return F.cross_entropy(F.linear(x, weight).float(), targets)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: int, wanted: bool) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        grad_x = torch.empty_like(x) if wanted else None
        grad_weight = torch.empty(weight.shape, dtype=torch.float32, device=x.device) if wanted else None
        for first in range(0, x.shape[0], rows):
            part, wished = x[first : first + rows], targets[first : first + rows, None]
            logits = F.linear(part, weight).float()
            probabilities = logits.softmax(-1)
            # The normalizer out of the likeliest token, whose probability never underflows.
            largest, likeliest = logits.max(-1, keepdim=True)
            normalizer = largest - probabilities.gather(1, likeliest).log()
            total += (normalizer - logits.gather(1, wished)).sum()
            if grad_x is None or grad_weight is None:
                continue
            probabilities.scatter_add_(1, wished, probabilities.new_full(wished.shape, -1.0))
            grad = probabilities.to(x.dtype)
            torch.mm(grad, weight, out=grad_x[first : first + rows])
            _add_product(grad_weight, grad, part, first == 0)
        ctx.gradients, ctx.tokens = (grad_x, grad_weight), x.shape[0]
        return total / x.shape[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (grad_x, grad_weight), scale = ctx.gradients, grad_loss / ctx.tokens
        # Scaled where they lie, so they serve once: a second backward through the same graph fails.
        ctx.gradients = None
        dtype = grad_x.dtype
        return grad_x.mul_(scale.to(dtype)), grad_weight.mul_(scale).to(dtype), None, None, None


def _add_product(total: Tensor, grad: Tensor, x: Tensor, first: bool) -> None:
    # total [vocab, hidden] += grad.T [vocab, rows] @ x [rows, hidden]; fp32 sums over the chunks.
    if grad.dtype == torch.float32:
        total.addmm_(grad.t(), x, beta=0.0 if first else 1.0)
    elif first:
        total.copy_(grad.t() @ x)
    else:
        total += grad.t() @ x
