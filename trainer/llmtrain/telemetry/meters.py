"""Meters of this process: its memory, the bytes of its collectives, and the peak rate of its matrix products."""

import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable
from functools import cache

import psutil
import torch
from llmtrain_kernels.matmul import matmul

from llmtrain.comm.device import allocated_memory, forget_peak_memory, synchronize
from llmtrain.plan.traffic import Traffic
from llmtrain.telemetry.metrics import Row


class CommMeter:
    """Counts the bytes of collectives since the last `take`.

    The code that launches a collective adds its size, so that nothing waits for the device.
    """

    def __init__(self) -> None:
        self._calls: list[Traffic] = []

    def add(self, calls: Iterable[Traffic]) -> None:
        """Count collectives."""
        self._calls.extend(calls)

    def take(self) -> Row:
        """Return the counts since the last take, and reset them to 0.

        comm_bytes: {group: {operation: bytes}}, of the larger of this rank's input and output buffers (nccl-tests'
        "size"). comm_sent_bytes: {link tier: bytes} that this rank sends to others. comm_quantized_share: share of the
        sent bytes that is quantized, 0 to 1.
        """
        calls, self._calls = self._calls, []
        sizes: dict[str, Counter[str]] = {}
        sent: Counter[str] = Counter()
        for call in calls:
            sizes.setdefault(call.purpose, Counter())[call.op] += call.size
            sent[call.tier] += call.sent
        packed, total = sum(call.sent for call in calls if call.packed), sent.total()
        return {
            "comm_bytes": {group: dict(ops) for group, ops in sizes.items()},
            "comm_sent_bytes": dict(sent),
            "comm_quantized_share": packed / total if total else 0.0,
        }


def memory_bytes(device: torch.device, model_states: int) -> dict[str, int]:
    """Return this process's memory, in bytes.

    rss, peak_rss: resident memory of the process. model_states: the given bytes of this rank's parameters, gradients
    and optimizer states. On CUDA also allocated, reserved and peak_allocated of the device.
    """
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    rss = _process(os.getpid()).memory_info().rss
    # The kernel updates the peak less often than the current figure, so it can lag behind.
    peak = max(rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    memory = {"rss": rss, "peak_rss": peak, "model_states": model_states}
    return memory | allocated_memory(device)


@cache
def _process(number: int) -> psutil.Process:
    """Return the process of a pid. Cached, because psutil reads its start time when it makes the object."""
    return psutil.Process(number)


def measured_peak(device: torch.device, dtype: torch.dtype, budget: float = 0.3) -> float:
    """Return the best rate in FLOP/s that a product of two square matrices reaches, after a warm-up.

    Sizes double from 512 up to 8192 while a product takes less than a tenth of `budget` seconds: small products do not
    fill a GPU, and large ones take seconds on a CPU. All sizes are timed in turn until the best rate has not risen by
    1% for `budget` seconds, or for 6 times that in all: on a loaded machine other processes interrupt most products.
    """
    # Use a separate generator: the run's random numbers must not depend on a measurement.
    random = torch.Generator(device).manual_seed(0)
    products = [_Product(random, dtype, 512)]
    started = time.perf_counter()
    # Warm up: threads start, torch chooses kernels, and the clocks rise.
    while time.perf_counter() < started + budget / 4:
        products[0].seconds()
    while products[-1].size < 8192 and 8 * products[-1].seconds() < budget / 10:
        products.append(_Product(random, dtype, 2 * products[-1].size))
        products[-1].seconds()
    best, started = 0.0, time.perf_counter()
    improved = now = started
    while now < min(improved, started + 5 * budget) + budget:
        rate = max(2 * product.size**3 / product.seconds() for product in products)
        now = time.perf_counter()
        improved = now if rate > 1.01 * best else improved
        best = max(best, rate)
    del products
    forget_peak_memory(device)
    return best


class _Product:
    """A product of two square matrices of `size` rows."""

    def __init__(self, random: torch.Generator, dtype: torch.dtype, size: int) -> None:
        self.size = size
        # Use random numbers: constants take less power, so a card computes them faster.
        self._matrix = torch.randn((size, size), dtype=dtype, device=random.device, generator=random)
        self._out = torch.empty_like(self._matrix)

    @torch.no_grad()
    def seconds(self) -> float:
        """Compute the product, and return the seconds that it took."""
        synchronize(self._matrix.device)
        started = time.perf_counter()
        matmul(self._matrix, self._matrix, self._out)
        synchronize(self._matrix.device)
        return max(time.perf_counter() - started, 1e-9)
