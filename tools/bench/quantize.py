"""Rate of the block quantization kernels on the CPU, compared to copying memory and to the torch reference.

    python tools/bench/quantize.py [--write docs/benchmarks.md]

A rate is the bytes that a call reads and writes, each counted once, divided by its time. A kernel reads and writes fp32
elements and packed rows; the copy is torch's `copy_` of equally many fp32 elements, 4 bytes read and 4 written each.
Sizes are those of the fp32 elements. Each round measures the copy right before every kernel, with the same number of
threads. A share is the median over rounds of the kernel's rate divided by that copy's. The reference does the same work
in torch. It has one warm-up call, and only some rounds measure it, because it is slow.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
from llmtrain_kernels.quantize.cpu import native_backend
from llmtrain_kernels.quantize.format import QuantizeBackend
from llmtrain_kernels.quantize.packed_size import packed_bytes
from llmtrain_kernels.quantize.reference import REFERENCE
from table import machine, table, write_section
from torch import Tensor

SIZES = {"512 KB": 1 << 17, "8 MB": 1 << 21, "64 MB": 1 << 24}
BLOCK = 256
ROWS = 4
"""Rows of a sum: the ranks of a small group."""

REFERENCE_ROUNDS = 3
SECONDS = 2e-3
"""A measurement repeats its call for at least this time."""

Calls = dict[str, tuple[Callable[[], object], Callable[[], object], int]]
"""For each kernel: its call, the reference's call, and the bytes that it reads and writes."""


def main() -> None:
    """Measure, print the table, and write it to the document if --write is given."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--write", type=Path, help="document to update with the table")
    arguments = parser.parse_args()
    native = native_backend()
    if native is None:
        raise SystemExit("the C++ kernels cannot be built here; run llmtrain doctor")
    measured = {}
    for threads, size in product(arguments.threads, SIZES):
        torch.set_num_threads(threads)
        measured[threads, size] = measure(native, SIZES[size], arguments.rounds)
    text = report(measured, arguments.rounds)
    print(text)
    if arguments.write:
        write_section(arguments.write, "quantize", text)


def kernels(native: QuantizeBackend, numel: int) -> Calls:
    """Return the calls of every kernel on `numel` fp32 elements."""
    torch.manual_seed(0)
    x, out = torch.randn(1, numel), torch.empty(1, numel)
    calls: Calls = {}
    for bits in (8, 4):
        packed = torch.empty(ROWS, packed_bytes(numel, bits, BLOCK), dtype=torch.uint8)
        native.quantize(x.expand(ROWS, -1), bits, BLOCK, packed, None)
        one = packed[:1].clone()
        moved = x.nbytes + one.nbytes
        for name, key in (("", None), (", stochastic", 1)):
            calls[f"quantize INT{bits}{name}"] = pair(native, "quantize", moved, x, bits, BLOCK, one, key)
        calls[f"dequantize INT{bits}"] = pair(native, "dequantize", moved, one, bits, BLOCK, out)
        several = packed.nbytes + x.nbytes
        arguments = packed, bits, BLOCK, out[0], False
        calls[f"dequantize_sum INT{bits}, {ROWS} rows"] = pair(native, "dequantize_sum", several, *arguments)
    return calls


def pair(
    native: QuantizeBackend, name: str, moved: int, *arguments: object
) -> tuple[partial[None], partial[None], int]:
    """Return the calls of both backends, and the bytes that a call moves."""
    return partial(getattr(native, name), *arguments), partial(getattr(REFERENCE, name), *arguments), moved


def measure(native: QuantizeBackend, numel: int, rounds: int) -> dict[str, tuple[float, float, float, float]]:
    """Return for each kernel: its GB/s, the copy's GB/s, their ratio, and its speed relative to the reference."""
    calls = kernels(native, numel)
    source, target = torch.randn(numel), torch.empty(numel)
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    slower: dict[str, list[float]] = {name: [] for name in calls}
    for _, reference, _ in calls.values():
        reference()
    for number in range(rounds):
        for name in calls if number % 2 == 0 else reversed(calls):
            kernel, reference, moved = calls[name]
            copied = 8 * numel / seconds(partial(copy, source, target)) / 1e9
            taken = seconds(kernel)
            rates[name].append((moved / taken / 1e9, copied))
            if number < REFERENCE_ROUNDS:
                slower[name].append(seconds(reference) / taken)
    return {
        name: (
            statistics.median(rate for rate, _ in pairs),
            statistics.median(copied for _, copied in pairs),
            statistics.median(rate / copied for rate, copied in pairs),
            statistics.median(slower[name]),
        )
        for name, pairs in rates.items()
    }


def copy(source: Tensor, target: Tensor) -> None:
    """Copy `source` to `target`."""
    target.copy_(source)


def seconds(call: Callable[[], object]) -> float:
    """Return the mean time of repeated calls after a warm-up call; if that is long, return its time."""
    started = time.perf_counter()
    call()
    if (elapsed := time.perf_counter() - started) > 25 * SECONDS:
        return elapsed
    started, repeats = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < SECONDS or repeats == 0:
        call()
        repeats += 1
    return elapsed / repeats


def report(measured: dict[tuple[int, str], dict[str, tuple[float, float, float, float]]], rounds: int) -> str:
    """Return the medians as markdown."""
    header = ["kernel", "threads", *(f"{size}: {what}" for size in SIZES for what in ("GB/s", "of copy", "/ torch"))]
    rows = []
    for threads in dict.fromkeys(threads for threads, _ in measured):
        columns = [measured[threads, size] for size in SIZES]
        copies = [statistics.median(values[1] for values in column.values()) for column in columns]
        rows.append(["copy", str(threads), *(cell for copied in copies for cell in (f"{copied:.1f}", "1.00", ""))])
        for name in columns[0]:
            row = [name, str(threads)]
            for rate, _, share, times in (column[name] for column in columns):
                row += [f"{rate:.1f}", f"{share:.2f}", f"{times:.1f}"]
            rows.append(row)
    shares = {
        size: min(values[2] for key in measured if key[1] == size for values in measured[key].values())
        for size in SIZES
    }
    times_torch = min(values[3] for column in measured.values() for values in column.values())
    return "\n".join(
        [
            "## Quantization on the CPU",
            "",
            f"{machine()}.",
            f"Blocks of {BLOCK}; {rounds} rounds, interleaved, medians; `python tools/bench/quantize.py`. A rate is "
            "the bytes read and written, each counted once, divided by time. The copy is torch's, of the same fp32 "
            'elements, measured right before each kernel. Sizes are those of the fp32 elements. "/ torch" is the '
            f"reference's time divided by the kernel's, median of {min(rounds, REFERENCE_ROUNDS)} rounds.",
            "",
            table(header, rows),
            "",
            "Smallest share of the copy's rate: "
            f"{', '.join(f'{share:.2f} at {size}' for size, share in shares.items())}; "
            f"smallest speedup over the torch reference: {times_torch:.1f}. Goals: 0.6 of the copy's rate, 3 times the "
            "reference. Beyond the caches, memory bandwidth limits the rate; inside them, the arithmetic does.",
        ]
    )


if __name__ == "__main__":
    main()
