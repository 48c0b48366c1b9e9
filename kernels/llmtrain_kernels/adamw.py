"""AdamW over flat ranges (Loshchilov and Hutter, 2019, algorithm 2), by one of several backends.

Tests compare every backend to `reference`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw


@dataclass(frozen=True)
class AdamWStep:
    """Hyperparameters of one step. step: counts from 1, for the bias correction. gradient_divisor: fp32 scalar tensor;
    the step divides gradients by it first (loss scale and clipping in one). None: no division."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    gradient_divisor: Tensor | None = None


# (master, m, v, gradient, numbers). A backend updates the first three in place and may overwrite the gradient.
Backend = Callable[[Tensor, Tensor, Tensor, Tensor, AdamWStep], None]


def adamw(backend: str, master: Tensor, m: Tensor, v: Tensor, gradient: Tensor, numbers: AdamWStep) -> None:
    """Step one flat range. Updates `master`, `m`, `v` (fp32 `[n]`) in place; may overwrite `gradient` (fp32 `[n]`)."""
    _backends()[backend](master, m, v, gradient, numbers)


def _backends() -> dict[str, Backend]:
    return {"reference": _reference, "torch": _torch, "apex": _apex}


def _reference(master: Tensor, m: Tensor, v: Tensor, gradient: Tensor, numbers: AdamWStep) -> None:
    if numbers.gradient_divisor is not None:
        gradient = gradient / numbers.gradient_divisor
    m.lerp_(gradient, 1 - numbers.beta1)
    v.mul_(numbers.beta2).addcmul_(gradient, gradient, value=1 - numbers.beta2)
    m_hat = m / (1 - numbers.beta1**numbers.step)
    v_hat = v / (1 - numbers.beta2**numbers.step)
    master.mul_(1 - numbers.lr * numbers.weight_decay)
    master.sub_(numbers.lr * m_hat / (v_hat.sqrt() + numbers.eps))


def _torch(master: Tensor, m: Tensor, v: Tensor, gradient: Tensor, numbers: AdamWStep) -> None:
    # The torch kernel increments the step itself.
    step = torch.tensor(float(numbers.step - 1), device=master.device)
    torch_adamw(
        [master],
        [gradient],
        [m],
        [v],
        [],
        [step],
        fused=True,
        grad_scale=numbers.gradient_divisor,
        amsgrad=False,
        beta1=numbers.beta1,
        beta2=numbers.beta2,
        lr=numbers.lr,
        weight_decay=numbers.weight_decay,
        eps=numbers.eps,
        maximize=False,
    )


def _apex(master: Tensor, m: Tensor, v: Tensor, gradient: Tensor, numbers: AdamWStep) -> None:
    import amp_C  # NVIDIA's apex, built with its CUDA extensions
    from apex.multi_tensor_apply import multi_tensor_applier

    if numbers.gradient_divisor is not None:
        gradient.div_(numbers.gradient_divisor)
    no_overflow = torch.zeros(1, dtype=torch.int, device=master.device)
    multi_tensor_applier(
        amp_C.multi_tensor_adam,
        no_overflow,
        [[gradient], [master], [m], [v]],
        numbers.lr,
        numbers.beta1,
        numbers.beta2,
        numbers.eps,
        numbers.step,
        1,  # decoupled weight decay
        1,  # bias correction
        numbers.weight_decay,
    )
