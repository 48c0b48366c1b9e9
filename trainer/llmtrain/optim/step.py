"""The numbers of an optimizer step."""

from llmtrain_kernels.adamw.step import AdamWStep
from torch import Tensor

from llmtrain.optim.config import AdamW


def clip_divisor(norm: float, loss_scale: float, clip: float) -> float:
    """Return the divisor of gradients that undoes the loss scale and clips their norm to `clip` (0: no clipping).

    norm: global norm of the scaled gradients.
    """
    if clip == 0:
        return loss_scale
    return loss_scale * max(norm / (loss_scale * clip), 1.0)


def step_numbers(config: AdamW, lr: float, step: int, divisor: Tensor) -> AdamWStep:
    """Return the numbers of a step with weight decay. step: applied steps, from 1. divisor: fp32 scalar on the CPU
    that divides the gradients."""
    return AdamWStep(step, lr, *config.betas, config.eps, config.weight_decay, divisor)
