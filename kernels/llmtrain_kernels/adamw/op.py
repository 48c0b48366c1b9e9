"""AdamW over flat ranges (Loshchilov and Hutter, 2019, algorithm 2), by one of several backends.

Tests compare every backend to `reference`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from llmtrain_kernels.adamw import cpu, reference
from llmtrain_kernels.adamw.step import AdamWStep

# (master, m, v, gradient, numbers). A backend updates the first three in place and may overwrite the gradient.
Backend = Callable[[Tensor, Tensor, Tensor, Tensor, AdamWStep], None]


def adamw(
    backend: str,
    master: Tensor,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    numbers: AdamWStep,
    weight: Tensor | None = None,
    into: cpu.States | None = None,
    threads: int | None = None,
) -> None:
    """Step one flat range. Updates `master`, `m`, `v` (fp32 `[n]`) in place; may overwrite `gradient` (fp32 `[n]`).

    weight: `[n]` of the compute dtype, which receives the new masters, rounded to nearest; None: nothing does.
    into: memory for the new states, which leaves the old ones as they are. threads: of the backend cpu.
    """
    if backend == "cpu":
        # One pass over memory, instead of a second one for the weights.
        cpu.step(master, m, v, gradient, numbers, weight, into=into, threads=threads)
        return
    after = into or (master, m, v)
    for old, new in zip((master, m, v), into or (), strict=False):
        new.copy_(old)
    _backends()[backend](*after, gradient, numbers)
    if weight is not None:
        weight.copy_(after[0])


def _backends() -> dict[str, Backend]:
    return {"reference": reference.step, "torch": _torch, "apex": _apex}


def _torch(master: Tensor, m: Tensor, v: Tensor, gradient: Tensor, numbers: AdamWStep) -> None:
    # The torch kernel increments the step itself.
    step = torch.full((), float(numbers.step - 1), device=master.device)
    torch_adamw(
        [master],
        [gradient],
        [m],
        [v],
        [],
        [step],
        fused=True,
        grad_scale=numbers.divisor_on(master.device),
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

    if (divisor := numbers.divisor_on(gradient.device)) is not None:
        gradient.div_(divisor)
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
