"""Gradient clipping, and the other numbers of an optimizer step."""

import torch
from llmtrain_kernels.adamw.step import AdamWStep
from torch import Tensor

from llmtrain.optim.config import AdamW


def step_divisor(loss: Tensor, norm: Tensor, loss_scale: float, clip: float) -> Tensor:
    """Return the divisor of gradients that undoes the loss scale and clips their norm to `clip` (0: no clipping): a
    fp32 scalar on the device of the arguments, NaN if one of these is not finite.

    loss: of the global batch. norm: of the scaled gradients. Both are fp64 scalars.
    """
    share = (norm / (loss_scale * clip)).clamp(min=1.0) if clip else torch.ones_like(norm)
    finite = loss.isfinite() & (norm / loss_scale).isfinite()
    return torch.where(finite, loss_scale * share, torch.nan).float()


def step_numbers(config: AdamW, lr: float, step: int, divisor: Tensor) -> AdamWStep:
    """Return the numbers of a step with weight decay. step: applied steps, from 1. divisor: see AdamWStep."""
    beta1, beta2 = config.betas
    return AdamWStep(
        step=step,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        gradient_divisor=divisor,
    )
