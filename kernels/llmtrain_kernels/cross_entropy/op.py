"""Output projection and cross-entropy in one operation, a few rows at a time, so that the logits of a whole
microbatch never exist. The gradients are made in the forward pass while a chunk's logits are at hand: they need
no second projection, and only the loss's own scale is applied in the backward pass."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain_kernels.matmul import matmul
from llmtrain_kernels.native import native_functions, takes_native

# Rows that a product needs to be bound by arithmetic and not by reading the weight, and, above that, elements of one
# chunk's logits.
LEAST_ROWS = 256
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy (fp32 scalar) of the logits `x @ weight.T`.

    x: `[tokens, hidden]`; weight: `[vocab, hidden]`, same dtype; targets: int64 `[tokens]`.
    """
    rows = chunk_rows(x.device.type, weight.shape[0])
    return _LinearCrossEntropy.apply(x, weight, targets, rows, torch.is_grad_enabled())


def chunk_rows(device: str, vocab: int) -> int:
    """Return how many rows of logits are made at a time on a type of device."""
    return max(LEAST_ROWS, CHUNK_ELEMENTS.get(device, 1 << 24) // vocab)


def reference_linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The plain form of `linear_cross_entropy` that it is tested against."""
    return F.cross_entropy(F.linear(x, weight).float(), targets)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: int, wanted: bool) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        grad_x = torch.empty_like(x) if wanted else None
        grad_weight = torch.empty(weight.shape, dtype=torch.float32, device=x.device) if wanted else None
        # One buffer for all chunks: fresh memory of this size is mapped anew each time on a CPU.
        all_logits = x.new_empty(min(rows, x.shape[0]), weight.shape[0])
        for first in range(0, x.shape[0], rows):
            part, wished = x[first : first + rows], targets[first : first + rows]
            logits = matmul(part, weight.t(), all_logits[: len(part)])
            total += _losses(logits, wished, wanted).sum()
            if grad_x is None or grad_weight is None:
                continue
            place = grad_x[first : first + rows]
            if (product := matmul(logits, weight, place)) is not place:
                place.copy_(product)
            add_product(grad_weight, logits, part, first == 0)
        ctx.gradients, ctx.tokens = (grad_x, grad_weight), x.shape[0]
        return total / x.shape[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (grad_x, grad_weight), scale = ctx.gradients, grad_loss / ctx.tokens
        # Scaled where they lie, so they serve once: a second backward through the same graph fails.
        ctx.gradients = None
        return grad_x.mul_(scale), grad_weight.mul_(scale).to(grad_x.dtype), None, None, None


@functools.cache
def _kernel() -> SimpleNamespace | None:
    return native_functions("cross_entropy", cross_entropy_rows="ppplllll")


def _losses(logits: Tensor, targets: Tensor, wanted: bool) -> Tensor:
    """Return each row's cross-entropy, fp32; where wanted, the logits become its gradient."""
    kernel = _kernel() if takes_native(logits) else None
    if kernel is None:
        return _plain_losses(logits, targets, wanted)
    targets, vocab = targets.contiguous(), logits.shape[1]
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < vocab:
        raise IndexError(f"targets lie between {targets.min()} and {targets.max()}; the vocabulary has {vocab} tokens")
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    is_bf16, threads = int(logits.dtype == torch.bfloat16), torch.get_num_threads()
    pointers = (logits.data_ptr(), targets.data_ptr(), losses.data_ptr())
    kernel.cross_entropy_rows(*pointers, int(wanted), *logits.shape, is_bf16, threads)
    return losses


def _plain_losses(logits: Tensor, targets: Tensor, wanted: bool) -> Tensor:
    probabilities, wished = torch.softmax(logits, -1, dtype=torch.float32), targets[:, None]
    # The normalizer out of the likeliest token, whose probability never underflows.
    normalizer = logits.amax(-1, keepdim=True).float() - probabilities.amax(-1, keepdim=True).log()
    losses = (normalizer - logits.gather(1, wished)).squeeze(1)
    if wanted:
        logits.copy_(probabilities.scatter_add_(1, wished, probabilities.new_full(wished.shape, -1.0)))
    return losses


def add_product(total: Tensor, grad: Tensor, x: Tensor, first: bool) -> None:
    """Add `grad.T @ x` to `total`, fp32 `[vocab, hidden]`, or replace it at the `first` of the chunks that are summed.

    grad: `[rows, vocab]`; x: `[rows, hidden]`.
    """
    if grad.dtype == torch.float32:
        total.addmm_(grad.t(), x, beta=0.0 if first else 1.0)
    elif first:
        total.copy_(grad.t() @ x)
    else:
        total += grad.t() @ x
