"""The kernel of attention on GPUs: the quickest, as timed at a run's first start."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from llmtrain_kernels.attention.choice import KERNELS, Kernel, is_installed, lack
from llmtrain_kernels.attention.op import causal_attention, take_kernel, takes_length
from torch import Tensor

from llmtrain.cluster.layout import Axis
from llmtrain.comm.device import forget_peak_memory, synchronize
from llmtrain.comm.ranks import Ranks
from llmtrain.model.dtypes import DTYPES
from llmtrain.plan.plan import Plan
from llmtrain.training.run_folder import measured_on_gpu

WARM_UP, REPEATS = 3, 10
# Of the norm of a kernel's result. NaN is never within it.
TOLERANCE = 0.05

TimeKernel = Callable[[Kernel], float]
"""Returns the seconds of forward and backward passes with a kernel. Raises RuntimeError or ImportError where the kernel
does not run."""


def quickest(plan: Plan, ranks: Ranks) -> tuple[Kernel, list[str]]:
    """Return the kernel of attention of the run's record, or else the quickest, and sentences about a measurement; the
    plan's own where it is the only one that suits. Collective."""
    candidates = _candidates(plan, ranks)
    if len(candidates) < 2:
        return plan.training.attention, []
    found = choose(plan, candidates, ranks, lambda kernel: _seconds(plan, kernel, ranks.device))
    forget_peak_memory(ranks.device)
    return found


def take_planned(plan: Plan) -> None:
    """Let this process take the plan's kernel of attention. CPUs have no choice."""
    if plan.device != "cpu":
        take_kernel(plan.training.attention)


def choose(plan: Plan, candidates: Sequence[Kernel], ranks: Ranks, seconds: TimeKernel) -> tuple[Kernel, list[str]]:
    """Return the kernel that the run's record names if it runs on the GPUs of all ranks, or else the quickest on the
    main rank of those that do; and sentences about it. The same kernel on all ranks. Collective."""
    folder = Path(plan.logging.dir) / plan.name
    recorded = ranks.from_main("attention", str(measured_on_gpu(folder).get("attention", "")) if ranks.is_main else "")
    # A run may resume on other GPUs.
    again = [one for one in candidates if one == recorded]
    if again and _running(again, ranks, seconds):
        return again[0], []
    times = _running(candidates, ranks, seconds)
    kernel = ranks.from_main("attention", min(times, key=times.__getitem__, default=plan.training.attention))
    shown = [_shown(one, times.get(one)) for one in candidates]
    said = ["attention, forward and backward, as measured: " + ", ".join(shown)] if ranks.is_main else []
    return next(one for one in candidates if one == kernel), said


def _running(kernels: Sequence[Kernel], ranks: Ranks, seconds: TimeKernel) -> dict[Kernel, float]:
    """Return the seconds of those kernels that run on the GPUs of all ranks, on this one. Collective."""
    times = {one: _time(one, seconds) for one in kernels}
    run = ranks.gather_all([int(spent is not None) for spent in times.values()])
    everywhere = map(all, zip(*run, strict=True))
    return {one: spent for (one, spent), runs in zip(times.items(), everywhere, strict=True) if runs and spent}


def _candidates(plan: Plan, ranks: Ranks) -> list[Kernel]:
    """Return the kernels that suit the run, and that all ranks have and would take. Collective."""
    wide, exact = plan.compute == "fp32", plan.training.deterministic
    suited = [kernel for kernel in KERNELS if not lack(kernel, wide, plan.model.dropout, exact)]
    length = plan.batch.sequence_length
    found = ranks.gather_all([int(is_installed(kernel) and takes_length(kernel, length)) for kernel in suited])
    return [kernel for kernel, everywhere in zip(suited, zip(*found, strict=True), strict=True) if all(everywhere)]


def _time(kernel: Kernel, seconds: TimeKernel) -> float | None:
    try:
        return seconds(kernel)
    except (RuntimeError, ImportError):
        # It does not run on this card, or not with these shapes.
        return None


def _shown(kernel: Kernel, seconds: float | None) -> str:
    return f"{kernel} does not run" if seconds is None else f"{kernel} {seconds * 1e3:.2f} ms"


def _seconds(plan: Plan, kernel: Kernel, device: torch.device) -> float:
    """Return the seconds of one layer's attention of one microbatch."""
    model, tensor = plan.model, plan.grid.degree(Axis.TENSOR)
    rows = (plan.batch.microbatch, plan.batch.sequence_length)
    heads = [count // tensor for count in (model.heads, model.heads, model.kv_heads, model.kv_heads)]
    dtype = DTYPES[plan.compute]
    # A generator of its own: a run with a measurement must draw the same numbers as one without.
    drawn = torch.Generator(device).manual_seed(0)
    shapes = [(*rows, count, model.head_dim) for count in heads]
    gradient, *given = (torch.randn(shape, generator=drawn, dtype=dtype, device=device) for shape in shapes)
    inputs = [one.requires_grad_() for one in given]
    check_agreement(kernel, inputs, gradient)
    begin, (q, k, v) = 0.0, inputs
    for repeat in range(WARM_UP + REPEATS):
        if repeat == WARM_UP:
            synchronize(device)
            begin = time.perf_counter()
        mixed = causal_attention(q, k, v, model.dropout, kernel)
        torch.autograd.grad(mixed, (q, k, v), gradient)
    synchronize(device)
    return (time.perf_counter() - begin) / REPEATS


def check_agreement(kernel: Kernel, inputs: Sequence[Tensor], gradient: Tensor) -> None:
    """Raise RuntimeError where a kernel's result and gradients without dropout are not those of torch's own kernel, but
    for rounding; then let torch take the kernel. inputs: queries, keys and values, with their gradient's `gradient`."""
    # Large scores: what is almost 0 and 1.
    for scale in (1.0, 16.0):
        q, k, v = (inputs[0] * scale).detach().requires_grad_(), *inputs[1:]
        found = []
        for one in dict.fromkeys(("torch", kernel)):
            take_kernel(one)
            mixed = causal_attention(q, k, v, 0.0, one)
            found.append([mixed.detach(), *torch.autograd.grad(mixed, (q, k, v), gradient)])
        for expected, result in zip(found[0], found[-1], strict=True):
            if not _near(expected.float(), result.float()):
                raise RuntimeError(f"{kernel} computes something else")


def _near(expected: Tensor, result: Tensor) -> bool:
    # Kernels round to 16 bits in different places, by which norms differ by less than a hundredth.
    return bool((result - expected).norm() <= TOLERANCE * expected.norm())
