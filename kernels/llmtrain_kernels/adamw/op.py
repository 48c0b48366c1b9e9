"""AdamW over flat ranges (Loshchilov and Hutter, 2019, algorithm 2), by one of several backends.

Tests compare every backend to `reference`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from llmtrain_kernels.adamw import cpu, reference
from llmtrain_kernels.adamw.step import AdamWStep

# (master, m, v, gradient, numbers). A backend updates the first three in place and may overwrite the gradient.
StepFunction = Callable[[Tensor, Tensor, Tensor, Tensor, AdamWStep], None]
# (start, end, whether weight decay applies)
Decay = tuple[int, int, bool]


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
    *,
    decay: Sequence[Decay] | None = None,
) -> None:
    """Step one flat range. Updates `master`, `m`, `v` (fp32 `[n]`) in place; may overwrite `gradient` (fp32 `[n]`; for
    the backends triton and cpu also bf16, and fp16 for triton).

    weight: `[n]` of the compute dtype, which receives the new masters, rounded to nearest; None: nothing does. into:
    memory for the new states, which leaves the old ones as they are. threads: number of threads of the backend cpu.
    decay: the parts of the range, in order, and whether weight decay applies to them; by default it applies to all.
    """
    before, parts = (master, m, v), [(0, len(master), True)] if decay is None else decay
    if backend == "triton":
        from llmtrain_kernels.adamw import triton_backend

        triton_backend.step(before, into or before, gradient, numbers, weight, _changes(parts))
        return
    for start, end, decays in parts:
        own = slice(start, end)
        decayed = numbers if decays else replace(numbers, weight_decay=0.0)
        rounded, after = None if weight is None else weight[own], None if into is None else _within(into, own)
        if backend == "cpu":
            # One pass over memory, instead of a second one for the weights.
            cpu.step(*_within(before, own), gradient[own], decayed, rounded, into=after, threads=threads)
        else:
            _in_two_passes(_backends()[backend], _within(before, own), gradient[own], decayed, rounded, after)


def _within(states: cpu.States, own: slice) -> cpu.States:
    master, m, v = states
    return master[own], m[own], v[own]


def _changes(parts: Sequence[Decay]) -> list[int]:
    """Return the elements at which weight decay switches on or off, ascending. It is off before the first one."""
    before = [False, *(decays for _, _, decays in parts)]
    return [start for (start, _, decays), last in zip(parts, before, strict=False) if decays != last]


def _in_two_passes(
    backend: StepFunction, before: cpu.States, gradient: Tensor, numbers: AdamWStep, weight: Tensor | None,
    into: cpu.States | None,
) -> None:  # fmt: skip
    after = into or before
    for old, new in zip(before, into or (), strict=False):
        new.copy_(old)
    backend(*after, gradient, numbers)
    if weight is not None:
        weight.copy_(after[0])


def _backends() -> dict[str, StepFunction]:
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
        found_inf=None if (divisor := numbers.decided_on(master.device)) is None else divisor.isnan().float(),
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
