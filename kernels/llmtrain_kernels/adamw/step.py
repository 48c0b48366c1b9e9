"""The numbers of an AdamW step."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """Hyperparameters of one step. step: counts from 1, for the bias correction. gradient_divisor: fp32 scalar tensor;
    the step divides gradients by it first (loss scale and clipping in one). None: no division. Where it is on the
    device of the states, the backends triton and torch leave the states as they are if it is NaN."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    gradient_divisor: Tensor | None = None

    def divisor_on(self, device: torch.device) -> Tensor | None:
        """Return `gradient_divisor` on a device. One on the CPU becomes the argument of a kernel, which no copy waits
        for."""
        divisor = self.gradient_divisor
        if divisor is None or divisor.device == device:
            return divisor
        return torch.full((), float(divisor), device=device)

    def decided_on(self, device: torch.device) -> Tensor | None:
        """Return `gradient_divisor` if it is on a device, which then decides whether it steps; None if the host has
        decided."""
        divisor = self.gradient_divisor
        return divisor if divisor is not None and divisor.device == device else None


class Factors(NamedTuple):
    """The numbers of a step that are equal for all elements, in fp64. Backends round them to fp32.

    m_share, v_share: the shares of the gradient and of its square in the new moments. v_kept: the share of the old
    second moment that is kept. eps, rate: AdamW's epsilon and learning rate with the bias corrections of both moments,
    so that an element needs no further division. kept: the share of the weight that weight decay keeps.
    """

    m_share: float
    v_share: float
    v_kept: float
    eps: float
    rate: float
    kept: float


def factors(numbers: AdamWStep) -> Factors:
    """Return the factors of a step."""
    correction = (1 - numbers.beta2**numbers.step) ** 0.5
    return Factors(
        m_share=1 - numbers.beta1,
        v_share=1 - numbers.beta2,
        v_kept=numbers.beta2,
        eps=numbers.eps * correction,
        rate=numbers.lr * correction / (1 - numbers.beta1**numbers.step),
        kept=1 - numbers.lr * numbers.weight_decay,
    )
