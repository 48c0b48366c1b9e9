"""One optimizer step over flat ranges."""

from llmtrain_kernels.adamw import AdamWStep, adamw
from torch import Tensor

from llmtrain.optim.config import AdamW


def clip_divisor(norm: float, loss_scale: float, clip: float) -> float:
    """Return what gradients are divided by to undo the loss scale and bring their norm down to `clip` (0: no clipping).

    norm: the global norm of the scaled gradients.
    """
    if clip == 0:
        return loss_scale
    return loss_scale * max(norm / (loss_scale * clip), 1.0)


def step_range(
    config: AdamW,
    decayed: int,
    states: tuple[Tensor, Tensor, Tensor, Tensor],
    lr: float,
    step: int,
    divisor: Tensor,
) -> None:
    """Step one flat range whose first `decayed` elements decay.

    states: master, m, v and gradient, fp32 `[n]`. step: applied steps, from 1. divisor: fp32 scalar.
    """
    for start, end, decay in ((0, decayed, config.weight_decay), (decayed, states[0].numel(), 0.0)):
        if start < end:
            master, m, v, gradient = (state[start:end] for state in states)
            numbers = AdamWStep(step, lr, *config.betas, config.eps, decay, divisor)
            adamw(config.backend, master, m, v, gradient, numbers)
