"""Checkpoint saving relative to the disk's speed, and how long an asynchronous save blocks the training loop.

    python tools/bench/checkpoint.py [--mib 1024] [--rounds 7] [--folder DIR] [--write docs/benchmarks.md]

Every round runs each contender once, with the same bytes on the same disk. Results are medians.
"""

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.checkpoint.state_shard import StateShard
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import Ranks
from llmtrain.model.config import GPTConfig
from llmtrain.model.tensors import model_units, parameter_count
from pydantic import JsonValue
from table import machine, table, write_section

BLOCK = 16 * 1024**2


@dataclass
class Bench:
    """The states of a model, and the folder for their checkpoints."""

    config: GPTConfig
    shards: list[StateShard]
    folder: Path

    @property
    def states(self) -> list[torch.Tensor]:
        """Every state of every shard."""
        return [state for shard in self.shards for state in shard.states.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for state in self.states)

    def checkpointer(self, asynchronous: bool) -> Checkpointer:
        """Return a checkpointer of one rank."""
        ranks = Ranks(0, 0, Layout({Axis.DATA: 1}), torch.device("cpu"))
        return Checkpointer(self.folder / "ours", ranks, 1, asynchronous)

    def about(self) -> dict[str, dict[str, JsonValue]]:
        """Return the checkpoint's metadata about its run."""
        return {"recipe": {}, "model": asdict(self.config)}


def model_of_size(mib: int) -> GPTConfig:
    """Return the smallest GPT-2 whose three fp32 states take at least `mib` MiB."""
    layers = 1
    while True:
        config = GPTConfig(
            family="gpt2", layers=layers, hidden=768, heads=12, kv_heads=12, ffn=3072, positions=1024, vocab=16384,
            tie_embeddings=True, norm_eps=1e-5, rope_theta=1e4, rotary_fraction=1.0, dropout=0.0,
            activation="gelu_tanh",
        )  # fmt: skip
        if parameter_count(config) * 12 >= mib * 2**20:
            return config
        layers += 1


def make(mib: int, folder: Path) -> Bench:
    """Return a model's states, filled with random numbers, which do not compress."""
    config = model_of_size(mib)
    shards = [
        StateShard(unit, 0, unit.numel, {name: torch.randn(unit.numel) for name in ("master", "m", "v")})
        for unit in model_units(config)
    ]
    return Bench(config, shards, folder)


def plain_write(bench: Bench) -> None:
    """Write the same bytes in blocks of 16 MiB, then fsync: the disk's speed."""
    fd = os.open(bench.folder / "plain", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for state in bench.states:
        view = state.numpy().data.cast("B")
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            while block:
                block = block[os.write(fd, block) :]
    os.fsync(fd)
    os.close(fd)


def torch_save(bench: Bench) -> None:
    """Save with torch.save, then fsync, as llmtrain does."""
    with open(bench.folder / "torch.pt", "wb") as file:
        torch.save(bench.states, file)
        file.flush()
        os.fsync(file.fileno())


def dcp_save(bench: Bench) -> None:
    """Save with torch.distributed.checkpoint, which calls fsync itself."""
    states = {f"state{index}": state for index, state in enumerate(bench.states)}
    dcp.save(states, checkpoint_id=bench.folder / "dcp", no_dist=True)


def seconds(work: Callable[[], object]) -> float:
    """Return the duration of `work`."""
    gc.collect()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def succeed(failure: str | None) -> None:
    """Exit with the message of a failed save, whose time is meaningless."""
    if failure is not None:
        raise SystemExit(failure)


def measure_saves(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Return seconds of each round, by contender. The first round is a warm-up; the order changes every round."""
    ours, steps = bench.checkpointer(asynchronous=False), count(1)
    contenders: dict[str, Callable[[], object]] = {
        "plain": lambda: plain_write(bench),
        "ours": lambda: succeed(ours.save(next(steps), bench.shards, {}, bench.about())),
        "torch.save": lambda: torch_save(bench),
        "dcp": lambda: dcp_save(bench),
    }
    names = deque(contenders)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name in names:
            times[name].append(seconds(contenders[name]))
            # Delete and write back outside the measured time.
            for path in bench.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        names.rotate()
    return {name: values[1:] for name, values in times.items()}


def measure_blocking(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Return the seconds that an asynchronous save blocks, and those of copying the states, interleaved."""
    ours, steps = bench.checkpointer(asynchronous=True), count(1)
    ours.reserve(bench.shards)
    buffers = [torch.zeros_like(state) for state in bench.states]

    def copy() -> None:
        for buffer, state in zip(buffers, bench.states, strict=True):
            buffer.copy_(state)

    contenders: dict[str, Callable[[], object]] = {
        "blocked": lambda: succeed(ours.save(next(steps), bench.shards, {}, bench.about())),
        "copied": copy,
    }
    names = deque(contenders)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name in names:
            times[name].append(seconds(contenders[name]))
            succeed(ours.wait())
            os.sync()
        names.rotate()
    succeed(ours.close())
    return {name: values[1:] for name, values in times.items()}


def ratio(upper: list[float], lower: list[float]) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(upper, lower, strict=True))


def row(name: str, values: list[float]) -> list[str]:
    """Return the name, the median and the range, in seconds."""
    return [name, f"{statistics.median(values):.3f}", f"{min(values):.3f} to {max(values):.3f}"]


def report(bench: Bench, saves: dict[str, list[float]], holds: dict[str, list[float]], load: float) -> str:
    """Return the section of the document. load: the machine's load average before the first round."""
    names = {
        "plain": "plain write, 16 MiB blocks, then fsync",
        "ours": "llmtrain, checksums included",
        "torch.save": "torch.save, then fsync",
        "dcp": "torch.distributed.checkpoint.save",
    }
    rows = []
    for name, values in saves.items():
        rate = bench.nbytes / statistics.median(values) / 1e9
        rows.append([*row(names[name], values), f"{rate:.2f}", f"{ratio(saves['plain'], values):.2f}"])
    first = table(["save", "seconds", "range", "GB/s", "rate / plain write's rate"], rows)
    blocked, copied = holds["blocked"], holds["copied"]
    second = table(
        ["blocks the loop", "seconds", "range", "time / copying's time"],
        [
            [*row("asynchronous save", blocked), f"{ratio(blocked, copied):.2f}"],
            [*row("copying the states into buffers", copied), "1.00"],
        ],
    )
    return (
        f"## Checkpoints\n\n{machine(('torch', 'xxhash'))}.\n\n"
        f"`python tools/bench/checkpoint.py`: {bench.nbytes / 1e9:.2f} GB of fp32 states on one rank. Each of "
        f"{len(blocked)} rounds runs every contender once, in changing order. Seconds are medians; ratios are medians "
        f"of the rounds' ratios. Load average of other work at the start: {load:.1f}.\n\n{first}\n\n{second}\n"
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the states")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=Path(), help="folder to write to, on the disk to measure")
    parser.add_argument("--write", type=Path, help="document to update with the tables")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench = make(arguments.mib, Path(folder))
        saves = measure_saves(bench, arguments.rounds)
        holds = measure_blocking(bench, arguments.rounds)
    text = report(bench, saves, holds, load)
    print(text)
    if arguments.write:
        write_section(arguments.write, "checkpoint", text)


if __name__ == "__main__":
    main()
