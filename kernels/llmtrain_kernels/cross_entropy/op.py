"""Output projection and cross-entropy in one operation. It processes a few rows at a time, so the logits of a whole
microbatch never exist. The forward pass computes the gradients from each chunk's logits, which avoids a second
projection. The backward pass only scales them."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain_kernels.cross_entropy.chunks import chunk_rows, row_stride
from llmtrain_kernels.matmul import matmul
from llmtrain_kernels.native import native_functions, takes_native
from llmtrain_kernels.triton_launch import takes_triton


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy (fp32 scalar) of the logits `x @ weight.T`.

    x: `[tokens, hidden]`; weight: `[vocab, hidden]`, same dtype; targets: int64 `[tokens]`.
    """
    rows = rows_on(x.device, weight.shape[0])
    return _LinearCrossEntropy.apply(x, weight, targets, rows, torch.is_grad_enabled())


def rows_on(device: torch.device, vocab: int) -> int:
    """Return how many rows of logits over `vocab` ids one chunk has on a device."""
    return chunk_rows(device.type, vocab)


def padded(weight: Tensor) -> Tensor:
    """Return the output matrix `[vocab, hidden]` with rows of zeros after its own, as many as products on its device
    need to be fast (`row_stride`); itself if none.

    Their logits and gradients are zeros, which add nothing to other gradients.
    """
    missing = row_stride(weight.device.type, len(weight)) - len(weight)
    return F.pad(weight, (0, 0, 0, missing)) if missing else weight


def unpadded(grad_weight: Tensor, vocab: int) -> Tensor:
    """Return the gradient `[vocab, hidden]` of the output matrix from that of the padded one; itself if nothing is
    padded.

    Not a view then: autograd adds the gradients of a tied embedding in place only if nothing else shares their memory.
    """
    return grad_weight if len(grad_weight) == vocab else grad_weight[:vocab]


def reference_linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute `linear_cross_entropy` with torch operations; the reference in tests."""
    return F.cross_entropy(F.linear(x, weight).float(), targets)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: int, needs_grad: bool) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        grad_x = torch.empty_like(x) if needs_grad else None
        vocab, weight = len(weight), padded(weight)
        grad_weight = torch.empty(weight.shape, dtype=torch.float32, device=x.device) if needs_grad else None
        # One buffer serves all chunks: on a CPU, the allocator maps memory of this size again at each allocation.
        all_logits = x.new_empty(min(rows, x.shape[0]), len(weight))
        for first in range(0, x.shape[0], rows):
            chunk, chunk_targets = x[first : first + rows], targets[first : first + rows]
            logits = matmul(chunk, weight.t(), all_logits[: len(chunk)])
            total += _losses(logits[:, :vocab], chunk_targets, needs_grad).sum()
            if grad_x is None or grad_weight is None:
                continue
            grad_chunk = grad_x[first : first + rows]
            if (product := matmul(logits, weight, grad_chunk)) is not grad_chunk:
                grad_chunk.copy_(product)
            add_product(grad_weight, logits, chunk, first == 0)
        ctx.gradients = (grad_x, None if grad_weight is None else unpadded(grad_weight, vocab))
        ctx.tokens = x.shape[0]
        return total / x.shape[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (grad_x, grad_weight), scale = ctx.gradients, grad_loss / ctx.tokens
        # Scaled in place, so a second backward through the same graph must fail.
        ctx.gradients = None
        return *scaled(grad_x, grad_weight, scale), None, None, None


@functools.cache
def _kernel() -> SimpleNamespace | None:
    return native_functions("cross_entropy", cross_entropy_rows="ppplllll")


def _losses(logits: Tensor, targets: Tensor, needs_grad: bool) -> Tensor:
    """Return the cross-entropy of each row, fp32 `[rows]`. If `needs_grad`, overwrite the logits with the gradient."""
    if takes_triton(logits):
        from llmtrain_kernels.cross_entropy import triton_backend

        return triton_backend.losses(logits, targets, needs_grad)
    kernel = _kernel() if takes_native(logits) else None
    if kernel is None:
        return _plain_losses(logits, targets, needs_grad)
    targets, vocab = targets.contiguous(), logits.shape[1]
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < vocab:
        raise IndexError(f"targets range from {targets.min()} to {targets.max()}; the vocabulary has {vocab} tokens")
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    is_bf16, threads = int(logits.dtype == torch.bfloat16), torch.get_num_threads()
    pointers = (logits.data_ptr(), targets.data_ptr(), losses.data_ptr())
    kernel.cross_entropy_rows(*pointers, int(needs_grad), *logits.shape, is_bf16, threads)
    return losses


def _plain_losses(logits: Tensor, targets: Tensor, needs_grad: bool) -> Tensor:
    probabilities, columns = torch.softmax(logits, -1, dtype=torch.float32), targets[:, None]
    # Take the normalizer from the most likely token: its probability never underflows.
    normalizer = logits.amax(-1, keepdim=True).float() - probabilities.amax(-1, keepdim=True).log()
    losses = (normalizer - logits.gather(1, columns)).squeeze(1)
    if needs_grad:
        logits.copy_(probabilities.scatter_add_(1, columns, probabilities.new_full(columns.shape, -1.0)))
    return losses


def add_product(total: Tensor, grad: Tensor, x: Tensor, first: bool) -> None:
    """Add `grad.T @ x` to `total` (fp32 `[vocab, hidden]`); overwrite `total` for the `first` chunk.

    grad: `[rows, vocab]`. x: `[rows, hidden]`.
    """
    beta = 0.0 if first else 1.0
    if grad.dtype == torch.float32:
        total.addmm_(grad.t(), x, beta=beta)
    elif _sums_in_fp32(grad):
        # The matrix product accumulates into the fp32 sum. This saves a product in the compute dtype, its rounding, and
        # two passes over memory.
        torch.addmm(total, grad.t(), x, out_dtype=torch.float32, beta=beta, out=total)
    elif first:
        total.copy_(grad.t() @ x)
    else:
        total += grad.t() @ x


def scaled(grad_x: Tensor, grad_weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return both gradients times `scale` (fp32 scalar), in the dtype of `grad_x`. Their memory may be reused.

    grad_weight: fp32.
    """
    if grad_weight.is_cuda and grad_x.dtype != torch.float32:
        # One pass each. On a CPU torch would make an fp32 copy first. A GPU rounds a factor without dimensions to the
        # 16 bits of what it multiplies.
        weight = torch.empty_like(grad_weight, dtype=grad_x.dtype)
        return grad_x.mul_(scale.view(1)), torch.mul(grad_weight, scale, out=weight)
    return grad_x.mul_(scale), grad_weight.mul_(scale).to(grad_x.dtype)


def _sums_in_fp32(x: Tensor) -> bool:
    return x.is_cuda and _adds_to_fp32(x.device, x.dtype)


@functools.cache
def _adds_to_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's product adds to an fp32 sum on a device. Some versions refuse, all of them on AMD's."""
    total, x = torch.zeros(8, 8, device=device), torch.zeros(8, 8, dtype=dtype, device=device)
    try:
        torch.addmm(total, x, x, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True
