"""Measure how fast a machine copies memory, and how fast its processors step AdamW."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from llmtrain_kernels.adamw.cpu import step
from llmtrain_kernels.adamw.step import AdamWStep
from torch import Tensor

from llmtrain.comm.device import device_of, gpu_count, synchronize
from llmtrain.launch.measure.memory_result import HOST, Copy, StepRate

COPIED, ELEMENTS = 2**30, 2**26
"""Bytes of a copy, and elements of a step, whose 18 bytes each are 1.2 GB: more than the caches of any processor
hold."""

REPEATS = 5
# fp32 masters and moments are read and written, the fp32 gradient is read, and the 16-bit weight is written.
_MOVED = 2 * 12 + 4 + 2


def host_copies(cores: int) -> Iterator[Copy]:
    """Yield the copies within the host's memory, by one thread and by one on each core."""
    source, target = torch.zeros(COPIED // 4), torch.zeros(COPIED // 4)
    for threads in dict.fromkeys((1, cores)):
        yield Copy(HOST, threads, COPIED / _seconds(lambda: target.copy_(source), threads))


def device_copies() -> Iterator[Copy]:
    """Yield the copies between the host and a GPU, from pinned and from pageable memory; none without a GPU."""
    if not gpu_count():
        return
    device = device_of(0)
    there = torch.zeros(COPIED // 4, device=device)
    for kind in ("pinned", "pageable"):
        here = torch.zeros(COPIED // 4, pin_memory=kind == "pinned")
        for name, target, source in (
            (f"from {kind} memory to the GPU", there, here),
            (f"from the GPU to {kind} memory", here, there),
        ):
            yield Copy(name, 1, COPIED / _seconds(partial(_copy, target, source, device), 1))


def adamw_steps(cores: int) -> Iterator[StepRate]:
    """Yield the rates of the AdamW kernel, by threads: 1, 2, 4 and so on up to one on each core."""
    master, m, v, gradient = (torch.zeros(ELEMENTS) for _ in range(4))
    weight = torch.zeros(ELEMENTS, dtype=torch.bfloat16)
    numbers = AdamWStep(step=10, lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    powers = (2**power for power in range(cores.bit_length()))
    for threads in dict.fromkeys((*powers, cores)):
        elements = ELEMENTS / _seconds(lambda: step(master, m, v, gradient, numbers, weight), threads)
        yield StepRate(threads, elements, elements * _MOVED)


def _copy(target: Tensor, source: Tensor, device: torch.device) -> None:
    target.copy_(source, non_blocking=True)
    synchronize(device)


def _seconds(call: Callable[[], object], threads: int) -> float:
    """Return the seconds of the fastest of some calls: other load on the machine only adds time."""
    before, found = torch.get_num_threads(), list[float]()
    torch.set_num_threads(threads)
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    torch.set_num_threads(before)
    return min(found[1:])
