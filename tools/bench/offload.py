"""Optimizer states in files: their rate compared to fio, and the step compared to the disk alone.

    python -m tools.bench.offload [--write docs/benchmarks.md]

A step reads and writes all states once. fio reads one file and writes another at once, as many bytes each way, in
blocks of the same size, past the page cache, on the same file system; its reads and its writes each have as many blocks
in flight as the step has for both together. "buckets" passes the states through the ring without computing; "step" also
runs AdamW on them. Each round runs every contender once, in changing order; the files were written before. Then the
states pass through one and two volumes, loop devices that are throttled to the same rate (needs root and cgroup v1).
Rates are bytes in one direction by the time of both.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from llmtrain.model.tensors import TensorSpec, UnitSpec
from llmtrain.offload.shard import OffloadedBuckets, OffloadedShard
from llmtrain.offload.staging import InPlace
from llmtrain.offload.states import FileStates
from llmtrain.offload.stepper import Stepper
from llmtrain.plan.offload import BUCKET, Bucket, Offload
from llmtrain.sharding.optimizer_shard import OptimizerShard, SeparateMasters, StepRule
from llmtrain_kernels.adamw.step import AdamWStep
from llmtrain_kernels.direct_io.queue import DEPTH, PIECE

from tools.bench.table import machine, median_interval, table, write_section
from tools.bench.volumes import throttled, volumes

STATES = 3
LIMIT, VOLUME = 200 * 10**6, 2**30


def main() -> None:
    """Measure, print the tables, and write them to the document if --write is given."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--millions", type=int, default=64, help="2**20 parameters")
    parser.add_argument("--folder", default="/var/tmp", help="a folder on the disk")
    parser.add_argument("--write", type=Path, help="document to update with the tables")
    arguments = parser.parse_args()
    if shutil.which("fio") is None:
        parser.error("fio is not installed (apt-get install fio)")
    torch.set_num_threads(arguments.threads)
    load, numel = os.getloadavg()[0], arguments.millions << 20
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        text = disk_report(measure_disk(folder, numel, arguments.rounds), numel, arguments.threads, load)
    text += "\n\n" + volume_report(measure_volumes(arguments.folder, arguments.rounds))
    print(text)
    if arguments.write:
        write_section(arguments.write, "offload", text)


class Stepped:
    """Optimizer states of one unit in files. paths: a folder on each volume."""

    def __init__(self, paths: Sequence[str], numel: int) -> None:
        unit = UnitSpec("unit", (TensorSpec(name="unit.weight", parameter="weight", shape=(numel,), decay=True),))
        offload = Offload(tier="nvme", share=1.0, paths=tuple(paths))
        buckets = [Bucket("unit", *ends, STATES) for ends in offload.buckets(0, numel)]
        self._buckets, self._tier = buckets, FileStates(buckets, paths)
        self._overlap = offload.overlap
        self._stepper = Stepper(self._tier, [InPlace(torch.get_num_threads())], offload.overlap)
        rule = StepRule(unit, numel, "cpu", SeparateMasters())
        resident = OptimizerShard(rule, (0, 0), torch.empty(0))
        outside = OffloadedBuckets(self._stepper, 0, buckets, {})
        self._shard = OffloadedShard(resident, outside, rule, {})
        self._gradient, self._weight = torch.randn(numel), torch.zeros(numel, dtype=torch.bfloat16)

    def pass_through(self) -> None:
        """Read and write every bucket."""
        for fetched in range(len(self._buckets) + self._overlap):
            if fetched < len(self._buckets):
                self._tier.fetch(fetched)
            if fetched >= self._overlap:
                self._tier.take(fetched - self._overlap, ahead=False)
                self._tier.put(fetched - self._overlap, ahead=False)
        self._tier.flush()

    def step(self) -> None:
        """Step all elements."""
        divisor = torch.tensor(1.5)
        numbers = AdamWStep(
            step=10, lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, gradient_divisor=divisor
        )
        self._stepper.decide(numbers)
        self._shard.step(self._shard.bounds, self._gradient, numbers, self._weight).wait()
        self._tier.flush()

    def close(self) -> None:
        """Remove the files."""
        self._stepper.close()
        self._tier.close()


def measure_disk(folder: str, numel: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contender in each round."""
    own, nbytes = Stepped([folder], numel), STATES * 4 * numel
    contenders: dict[str, Callable[[], float]] = {
        "fio": lambda: fio_seconds(folder, nbytes),
        "buckets": lambda: seconds(own.pass_through),
        "step": lambda: seconds(own.step),
    }
    found = in_turns(contenders, rounds)
    own.close()
    return found


def measure_volumes(folder: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of passing states through one and through two throttled volumes."""
    numel = 16 << 20
    with volumes([VOLUME, VOLUME], folder) as paths:
        both = [str(path) for path in paths]
        one, two = Stepped(both[:1], numel), Stepped(both, numel)
        with throttled(paths, LIMIT):
            calls = {
                "one volume": lambda: seconds(one.pass_through),
                "two volumes": lambda: seconds(two.pass_through),
            }
            found = in_turns(calls, max(3, rounds // 3))
        one.close()
        two.close()
    return found


def in_turns(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call every contender once before and then once a round, in changing order; return what each returned."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds + 1):
        for name in names if number % 2 else reversed(names):
            took = contenders[name]()
            if number:
                found[name].append(took)
    return found


def seconds(call: Callable[[], None]) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def fio_seconds(folder: str, nbytes: int) -> float:
    """Return how long fio takes to read `nbytes` and write as many at once."""
    common = [f"--directory={folder}", "--ioengine=io_uring", "--direct=1", f"--bs={PIECE}", f"--iodepth={DEPTH}"]
    common += [f"--size={nbytes}", "--fallocate=posix", "--overwrite=1", "--end_fsync=0", "--output-format=json"]
    jobs = ["--name=read", "--rw=read", "--name=write", "--rw=write"]
    done = subprocess.run(["fio", *common, *jobs], check=True, capture_output=True, text=True).stdout
    found = json.loads(done[done.index("{") :])["jobs"]
    return max(job[way]["runtime"] for job in found for way in ("read", "write")) / 1000


def disk_report(measured: dict[str, list[float]], numel: int, threads: int, load: float) -> str:
    """Return the section about one disk."""
    nbytes = STATES * 4 * numel
    header = ("", "MB/s each way", "compared to fio", "compared to the buckets alone")
    rows = []
    for name, times in measured.items():
        to_fio = ratio(measured["fio"], times)
        to_disk = ratio(times, measured["buckets"]) if name == "step" else ""
        rows.append((name, f"{nbytes / statistics.median(times) / 1e6:.0f}", "" if name == "fio" else to_fio, to_disk))
    return f"""## Offloaded optimizer states

`python -m tools.bench.offload`: {machine()}, {threads} threads, load {load:.1f} at the start. {numel >> 20} Mi
elements, three fp32 states, {len(measured["fio"])} rounds in turns, buckets of {BUCKET} elements, blocks of
{PIECE >> 20} MiB. A step reads and writes all states; fio reads and writes as many bytes at once, each way with
{DEPTH} blocks in flight. Ratios are medians over rounds, with an interval of at least 95%: of rates to fio's, of times
to those of the buckets alone.

{table(header, rows)}"""


def volume_report(measured: dict[str, list[float]]) -> str:
    """Return the section about throttled volumes."""
    header = ("volumes of 200 MB/s each way", "seconds", "rate, compared to one")
    rows = [
        (name, f"{statistics.median(times):.2f}", ratio(measured["one volume"], times))
        for name, times in measured.items()
    ]
    return table(header, rows)


def ratio(above: Sequence[float], below: Sequence[float]) -> str:
    """Return the median of the ratios of each round, and its interval."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    low, high = median_interval(ratios)
    return f"{statistics.median(ratios):.2f} ({low:.2f}-{high:.2f})"


if __name__ == "__main__":
    main()
