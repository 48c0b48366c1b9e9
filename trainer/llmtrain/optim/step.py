"""The numbers of an optimizer step."""

from llmtrain_kernels.adamw import AdamWStep
from torch import Tensor

from llmtrain.optim.config import AdamW


def clip_divisor(norm: float, loss_scale: float, clip: float) -> float:
    """Return what gradients are divided by to undo the loss scale and bring their norm down to `clip` (0: no clipping).

    norm: the global norm of the scaled gradients.
    """
    if clip == 0:
        return loss_scale
    return loss_scale * max(norm / (loss_scale * clip), 1.0)


def step_numbers(config: AdamW, lr: float, step: int, divisor: Tensor) -> AdamWStep:
    """Return the numbers of a step of what decays. step: applied steps, from 1. divisor: fp32 scalar that gradients are
    divided by."""
    return AdamWStep(step, lr, *config.betas, config.eps, config.weight_decay, divisor)
