"""AdamW on a CPU, in C++: one pass over memory, which also writes the weights."""

import functools
from types import SimpleNamespace

import torch
from torch import Tensor

from llmtrain_kernels.adamw import reference
from llmtrain_kernels.adamw.step import AdamWStep, factors
from llmtrain_kernels.native import native_functions, takes_native
from llmtrain_kernels.squared_sum.op import SQUARES_BLOCK, squared_sum

# The most numbers that an instruction processes: 16 with AVX-512, 8 with AVX2, 4 without intrinsics.
LANES = (16, 8, 4)

# Masters and both moments.
States = tuple[Tensor, Tensor, Tensor]


def step(
    master: Tensor,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    numbers: AdamWStep,
    weight: Tensor | None = None,
    *,
    offset: int = 0,
    squares: Tensor | None = None,
    into: States | None = None,
    threads: int | None = None,
    lanes: int = LANES[0],
) -> None:
    """Update `master`, `m`, `v` (fp32 `[n]`) in place, in the operations and with the bits of `reference.step`.

    gradient: fp32 or bf16 `[n]`, read only. weight: fp32, bf16 or fp16 `[n]`, which receives the new masters, rounded
    to nearest, ties to even. squares: fp64 scalar, which receives `squared_sum(gradient, offset)`. offset: position of
    the range in its flat buffer. into: memory for the new states, which leaves the old ones as they are. threads:
    number of OpenMP's threads; torch's number by default. lanes: the widest instruction set to use, one of LANES. All
    tensors are contiguous. Without a C++ compiler, `reference.step` runs.
    """
    before, after = (master, m, v), into or (master, m, v)
    kernel = _kernel() if takes_native(master) else None
    if kernel is None:
        for old, new in zip(before, into or (), strict=False):
            new.copy_(old)
        reference.step(*after, gradient.float(), numbers)
        if squares is not None:
            squares.copy_(squared_sum(gradient.float(), offset))
    else:
        written = weight if weight is not None and takes_native(weight) else None
        divisor = 1.0 if numbers.gradient_divisor is None else float(numbers.gradient_divisor)
        blocks = -(-(offset % SQUARES_BLOCK + master.numel()) // SQUARES_BLOCK)
        sums = None if squares is None else torch.zeros(blocks, dtype=torch.float64)
        kernel.adamw(
            *(each.data_ptr() for each in (*before, *after)),
            *_address(gradient),
            *_address(written),
            *(None if each is None else each.data_ptr() for each in (sums, squares)),
            divisor,
            *factors(numbers),
            master.numel(),
            offset % SQUARES_BLOCK,
            SQUARES_BLOCK,
            lanes,
            threads or torch.get_num_threads(),
        )
        if written is weight:
            return
    if weight is not None:
        weight.copy_(after[0])


def _address(x: Tensor | None) -> tuple[int | None, bool]:
    """Return the address of a range, and whether it is bf16; None has no address."""
    return (None, False) if x is None else (x.data_ptr(), x.dtype == torch.bfloat16)


@functools.cache
def _kernel() -> SimpleNamespace | None:
    return native_functions("adamw", adamw="ppppppplplpp" + "f" * 7 + "l" * 5)
