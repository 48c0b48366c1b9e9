"""The cost of verifying data in a training step, and its dependence on the block size.

    python tools/bench/reading.py [--write docs/benchmarks.md]

A new reader reads every batch. This is the worst case: a reader verifies each block only once. One process times a
step, a batch without and a batch with verification, interleaved. Each batch has its own positions, so that its tokens
are never in the CPU cache.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from llmtrain.training.loop import train_step
from llmtrain_data import checksums
from llmtrain_data.dataset import Samples, Source
from llmtrain_data.indexed import IndexedData, IndexedWriter
from llmtrain_data.verify import write_checksums

sys.path.insert(0, str(Path(__file__).parent))
from step import CASES, Case, our_loop
from table import machine, median_interval, table, write_section

DOCUMENTS = 32_000
"""Of 2000 tokens each. They fill 2000 blocks, so that two samples of a batch rarely share one."""

SIZES = [1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20]
SEQUENCE, TOGETHER = 1024, 8
"""Tokens of a sample, and samples of a batch, for the comparison of block sizes."""


def main() -> None:
    """Measure, print the report, and write it to the document if --write is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--folder", type=Path, help="folder for the sets (default: a temporary one)")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    steps = [case_row(case, arguments.rounds, arguments.folder) for case in CASES if not case.compiled]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        prefix = Path(folder) / "set"
        writer = IndexedWriter(prefix, np.dtype(np.uint16))
        writer.add(np.random.default_rng(0).integers(0, 50_000, DOCUMENTS * 2000, np.uint16), np.full(DOCUMENTS, 2000))
        writer.commit()
        sizes = {size: size_row(size, prefix, arguments.rounds) for size in SIZES}
    text = report(steps, sizes, arguments.rounds)
    print(text)
    if arguments.write:
        write_section(arguments.write, "reading", text)


def report(steps: list[list[str]], sizes: dict[int, tuple[list[str], float]], rounds: int) -> str:
    """Return the markdown report."""
    most = sizes[checksums.CHECKSUM_BLOCK][1]
    return "\n".join(
        [
            "## Verified reading",
            "",
            f"{machine(['torch', 'numpy', 'xxhash'])}. `python tools/bench/reading.py`, {rounds} interleaved rounds; "
            "medians, with 95% confidence intervals in parentheses. Reading a sample verifies all of its blocks, as in "
            "a run's first epoch. The share of the step is computed from the interval's upper end. Goal: less than 1%.",
            "",
            table(
                ["model, fp32", "step, ms", "batch unverified, us", "verifying adds, us", "of the step, at most"],
                steps,
            ),
            "",
            f"One sample of {SEQUENCE + 1} tokens of 2 bytes, by block size, in batches of {TOGETHER}. Warm: the set "
            "is in the page cache. Cold: it is on the disk. Prepared sets have blocks of "
            f"{checksums.CHECKSUM_BLOCK // 1024} KiB. Verifying a sample in the page cache takes at most "
            f"{most * 1e6:.0f} us. "
            f"This is 1% of a step if a rank trains on {0.01 / most * SEQUENCE:,.0f} tokens per second.",
            "",
            table(
                [
                    "block",
                    "checksums of 10B tokens",
                    "warm, unverified, us",
                    "verifying adds, us",
                    "cold, unverified, us",
                    "verifying adds, us",
                ],
                [row for row, _ in sizes.values()],
            ),
        ]
    )


def case_row(case: Case, rounds: int, parent: Path | None) -> list[str]:
    """Return the row of one model."""
    steps, pairs = list[float](), list[tuple[float, float]]()
    with tempfile.TemporaryDirectory(dir=parent) as folder, our_loop(case, Path(folder), DOCUMENTS) as run:
        for number in range(rounds + 1):
            started = time.perf_counter()
            train_step(run, number)
            step = time.perf_counter() - started
            pair = batches(Path(folder) / "set", case.sequence, case.batch, number)
            if number:  # the first round is a warm-up
                steps.append(step)
                pairs.append(pair)
    step, added = statistics.median(steps), [verified - plain for plain, verified in pairs]
    row = [case.name, f"{step * 1e3:.0f}", micro([plain for plain, _ in pairs]), micro(added)]
    print(*row, file=sys.stderr)
    return [*row, f"{median_interval(added)[1] / step:.3%}"]


def size_row(size: int, prefix: Path, rounds: int) -> tuple[list[str], float]:
    """Return the row of one block size, and the seconds that verifying adds to a warm sample (upper end)."""
    used, checksums.CHECKSUM_BLOCK = checksums.CHECKSUM_BLOCK, size
    try:
        write_checksums(prefix, overwrite=True)
        warm, cold = (
            [batches(prefix, SEQUENCE, TOGETHER, number, cold) for number in range(rounds + 1)][1:]
            for cold in (False, True)
        )
    finally:
        checksums.CHECKSUM_BLOCK = used
    row = [f"{size // 1024} KiB", f"{20e9 / size * 8 / 1e6:.1f} MB"]
    added = [[(verified - plain) / TOGETHER for plain, verified in pairs] for pairs in (warm, cold)]
    for pairs, more in zip((warm, cold), added, strict=True):
        row += [micro([plain / TOGETHER for plain, _ in pairs]), micro(more)]
    print(*row, file=sys.stderr)
    return row, median_interval(added[0])[1]


def batches(prefix: Path, sequence: int, count: int, number: int, cold: bool = False) -> tuple[float, float]:
    """Return the seconds of a batch without and of a batch with verification, each by a new reader, in alternating
    order. cold: drop the set from the page cache first."""
    seconds = [0.0, 0.0]
    for place in (0, 1) if number % 2 else (1, 0):
        # An untimed batch first: after a step, the CPU caches are full of other data.
        reader(prefix, sequence, verified=bool(place)).batch(2, 2 * number + place, 1)
        samples = reader(prefix, sequence, verified=bool(place))
        if cold:
            forget(prefix)
        started = time.perf_counter()
        samples.batch(1, (2 * number + place) * count, count)
        seconds[place] = time.perf_counter() - started
    return seconds[0], seconds[1]


def reader(prefix: Path, sequence: int, verified: bool) -> Samples:
    """Return the set's samples. verified: verify checksums at reads."""
    data = IndexedData(prefix, verified)
    return Samples([Source(data=data, weight=1.0, documents=data.documents, first=0, last=data.token_count)], sequence)


def micro(seconds: list[float]) -> str:
    """Return the median in microseconds, with its confidence interval."""
    low, high = median_interval(seconds)
    return f"{statistics.median(seconds) * 1e6:.0f} ({low * 1e6:.0f} to {high * 1e6:.0f})"


def forget(prefix: Path) -> None:
    """Drop the tokens from the page cache."""
    descriptor = os.open(f"{prefix}.bin", os.O_RDONLY)
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


if __name__ == "__main__":
    main()
