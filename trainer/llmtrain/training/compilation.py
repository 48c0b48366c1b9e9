"""Whether torch.compile builds the blocks' kernels on GPUs: where it makes them faster, as timed at a run's first
start."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from llmtrain.cluster.layout import Axis
from llmtrain.comm.device import forget_peak_memory, own_generators, synchronize
from llmtrain.comm.ranks import Ranks
from llmtrain.model.dtypes import DTYPES
from llmtrain.model.layers import Block, rotary_tables
from llmtrain.plan.plan import Plan
from llmtrain.training.run_folder import measured_on_gpu

WARM_UP, REPEATS = 3, 10
# A run's own work on the host comes to that of launching, so that a GPU may wait from about here on. Whether compiled
# passes are faster is then measured.
BUSY = 0.5

ForwardBackward = Callable[[Tensor], Tensor]


class Timed(NamedTuple):
    """Forward and backward passes of a block. seconds: of the device and the host together. launching: of the host,
    which launches them."""

    seconds: float
    launching: float


def compiles(plan: Plan, ranks: Ranks) -> tuple[bool, list[str]]:
    """Return whether to compile the blocks, and sentences about a measurement: what the run's record says, or else what
    the main rank measures. Never where a block is cut into several graphs, or where kernels have to be exact.
    Collective."""
    degree = plan.grid.degree
    if degree(Axis.TENSOR) > 1 or degree(Axis.PIPELINE) > 1 or plan.training.deterministic:
        return False, []
    chosen, said = "", list[str]()
    ranks.activity.begin("timing a block, which may be compiled")
    if ranks.is_main:
        recorded = measured_on_gpu(Path(plan.logging.dir) / plan.name).get("compile")
        if isinstance(recorded, bool):
            chosen = str(recorded)
        else:
            compiled, sentence = measure(*_passes(plan, ranks.device), ranks.activity.moving)
            chosen, said = str(compiled), [sentence]
            forget_peak_memory(ranks.device)
    return ranks.from_main("compile", chosen) == str(True), said


def measure(
    passes: ForwardBackward, inputs: Sequence[Tensor], moving: Callable[[], object] = lambda: None
) -> tuple[bool, str]:
    """Return whether passes of a block are faster if they are compiled, and a sentence about it. They are compiled only
    if the host launches them for half of the time that they take, or longer. inputs: the block's input, and its
    parameters. moving: called between the parts."""
    try:
        plain = _timed(passes, inputs)
    except RuntimeError as error:
        # The run may still fit where this does not.
        return False, f"a block cannot be timed here: {_first_line(error)}"
    moving()
    found = f"a block's passes take {plain.seconds * 1e3:.2f} ms, and {plain.launching * 1e3:.2f} ms to launch"
    if plain.launching < BUSY * plain.seconds:
        return False, f"{found}, so torch.compile is not tried"
    try:
        compiled = _timed(torch.compile(passes, dynamic=False), inputs)
    except Exception as error:
        # Whatever the compiler lacks on this machine, the run does not need it.
        return False, f"{found}; torch.compile fails here: {_first_line(error)}"
    finally:
        # What was compiled for this block is no part of the run; what is on disk stays.
        torch.compiler.reset()
    return compiled.seconds < plain.seconds, f"{found}; compiled, {compiled.seconds * 1e3:.2f} ms"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _passes(plan: Plan, device: torch.device) -> tuple[ForwardBackward, list[Tensor]]:
    """Return the forward pass of one of the plan's blocks, and an input with the block's parameters."""
    model, dtype = plan.model, DTYPES[plan.compute]
    # A generator of its own: a run with a measurement must draw the same numbers as one without.
    drawn = torch.Generator(device).manual_seed(0)
    block = Block(model).to_empty(device=device).to(dtype)
    block.attention.kernel = plan.training.attention
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02, generator=drawn)
    shape = (plan.batch.microbatch, plan.batch.sequence_length, model.hidden)
    x = torch.randn(shape, generator=drawn, dtype=dtype, device=device).requires_grad_()
    rotary = None if model.family == "gpt2" else rotary_tables(model, device)
    forward = block.forward
    return lambda values: forward(values, rotary), [x, *block.parameters()]


def _timed(passes: ForwardBackward, inputs: Sequence[Tensor]) -> Timed:
    """Time passes. Random numbers that dropout draws are given back."""
    begin, x = 0.0, inputs[0]
    with torch.random.fork_rng(own_generators(x.device)):
        for repeat in range(WARM_UP + REPEATS):
            if repeat == WARM_UP:
                synchronize(x.device)
                begin = time.perf_counter()
            torch.autograd.grad(passes(x).sum(), inputs)
        launched = time.perf_counter()
        synchronize(x.device)
    return Timed((time.perf_counter() - begin) / REPEATS, (launched - begin) / REPEATS)
