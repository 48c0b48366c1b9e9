"""The kernel of attention on GPUs: the quickest, as timed at a run's first start."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from llmtrain_kernels.attention.choice import KERNELS, Kernel, is_installed, lack
from llmtrain_kernels.attention.op import causal_attention, take_kernel

from llmtrain.cluster.layout import Axis
from llmtrain.comm.device import forget_peak_memory, synchronize
from llmtrain.comm.ranks import Ranks
from llmtrain.model.dtypes import DTYPES
from llmtrain.plan.plan import Plan
from llmtrain.training.run_folder import measured_on_gpu

WARM_UP, REPEATS = 3, 10

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
    """Return the kernel that the run's record names, or else the quickest on the main rank; and sentences about it. The
    same kernel on all ranks. Collective."""
    kernel, said = "", list[str]()
    if ranks.is_main:
        kernel = measured_on_gpu(Path(plan.logging.dir) / plan.name).get("attention", "")
        if kernel not in candidates:
            times = {one: _time(one, seconds) for one in candidates}
            kernel = min(times, key=times.__getitem__)
            said = ["attention, forward and backward, as measured: " + ", ".join(map(_shown, times, times.values()))]
    kernel = ranks.from_main("attention", kernel)
    return next(one for one in candidates if one == kernel), said


def _candidates(plan: Plan, ranks: Ranks) -> list[Kernel]:
    """Return the kernels that suit the run and are installed for all ranks. Collective."""
    wide, exact = plan.compute == "fp32", plan.training.deterministic
    suited = [kernel for kernel in KERNELS if not lack(kernel, wide, plan.model.dropout, exact)]
    installed = ranks.gather_all([int(is_installed(kernel)) for kernel in suited])
    return [kernel for kernel, everywhere in zip(suited, zip(*installed, strict=True), strict=True) if all(everywhere)]


def _time(kernel: Kernel, seconds: TimeKernel) -> float:
    try:
        return seconds(kernel)
    except (RuntimeError, ImportError):
        # It does not run on this card, or not with these shapes.
        return float("inf")


def _shown(kernel: Kernel, seconds: float) -> str:
    return f"{kernel} does not run" if seconds == float("inf") else f"{kernel} {seconds * 1e3:.2f} ms"


def _seconds(plan: Plan, kernel: Kernel, device: torch.device) -> float:
    """Return the seconds of one layer's attention of one microbatch."""
    take_kernel(kernel)
    model, tensor = plan.model, plan.grid.degree(Axis.TENSOR)
    rows = (plan.batch.microbatch, plan.batch.sequence_length)
    heads = [count // tensor for count in (model.heads, model.heads, model.kv_heads, model.kv_heads)]
    dtype = DTYPES[plan.compute]
    # A generator of its own: a run with a measurement must draw the same numbers as one without.
    drawn = torch.Generator(device).manual_seed(0)
    shapes = [(*rows, count, model.head_dim) for count in heads]
    gradient, *given = (torch.randn(shape, generator=drawn, dtype=dtype, device=device) for shape in shapes)
    q, k, v = (one.requires_grad_() for one in given)
    begin = 0.0
    for repeat in range(WARM_UP + REPEATS):
        if repeat == WARM_UP:
            synchronize(device)
            begin = time.perf_counter()
        mixed = causal_attention(q, k, v, model.dropout, kernel)
        torch.autograd.grad(mixed, (q, k, v), gradient)
    synchronize(device)
    return (time.perf_counter() - begin) / REPEATS
