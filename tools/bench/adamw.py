"""Time of the AdamW kernel on the CPU, compared to torch's fused AdamW and to the same memory traffic alone.

    python tools/bench/adamw.py [--write docs/benchmarks.md]

All contenders step the same fp32 masters and moments with the same fp32 gradient, and write bf16 weights. With
clipping, ours sums the squares of the gradient and then divides by the clipping divisor in the step; torch's side is
what a training script does: `clip_grad_norm_`, `AdamW(fused=True).step()`, and a copy to bf16. The bound is a C++ loop
that reads and writes the same streams, almost without arithmetic, and past the caches where the kernel does. A step's
rate is the bytes that it reads and writes, each counted once, divided by its time. Each round runs every contender
once, in changing order.
"""

import argparse
import ctypes
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from llmtrain_kernels.adamw.op import adamw
from llmtrain_kernels.adamw.step import AdamWStep
from llmtrain_kernels.native import native_reason
from llmtrain_kernels.squared_sum.op import squared_sum
from table import machine, median_interval, table, write_section

TENSORS = 64
"""The parameters of torch's side: a model has many."""

MOVED = 4 + 2 * 12 + 2
"""Bytes per element: the gradient is read, master and moments are read and written, the weight is written."""

BOUND, STEP, TORCH_STEP = "the same streams, without arithmetic", "llmtrain", "torch's fused AdamW, copy"
CLIPPED, TORCH_CLIPPED = "llmtrain, with clipping", "torch's clip_grad_norm_, fused AdamW, copy"

Calls = dict[str, Callable[[], object]]


def main() -> None:
    """Measure, print the table, and write it to the document if --write is given."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--millions", type=int, default=64, help="2**20 parameters")
    parser.add_argument("--write", type=Path, help="document to update with the table")
    arguments = parser.parse_args()
    if reason := native_reason(("adamw", "squared_sum")):
        raise SystemExit(reason)
    torch.set_num_threads(arguments.threads)
    if (arguments.millions << 20) % (64 * arguments.threads):
        raise SystemExit("expected a number of threads that divides the parameters into equal shares")
    load = os.getloadavg()[0]
    measured = measure(contenders(arguments.millions << 20, arguments.threads), arguments.rounds)
    text = report(measured, arguments.millions, arguments.threads, load)
    print(text)
    if arguments.write:
        write_section(arguments.write, "adamw", text)


def contenders(numel: int, threads: int) -> Calls:
    """Return the call of each contender. They share memory: pages lie equally for all."""
    torch.manual_seed(0)
    gradient, master, m, v = torch.randn(numel), torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    weight = torch.zeros(numel, dtype=torch.bfloat16)
    parameters = [torch.nn.Parameter(part) for part in master.chunk(TENSORS)]
    weights = weight.chunk(TENSORS)
    for parameter, part in zip(parameters, gradient.chunk(TENSORS), strict=True):
        parameter.grad = part
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for parameter, *moments in zip(parameters, m.chunk(TENSORS), v.chunk(TENSORS), strict=True):
        state = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **state}

    def step(divisor: torch.Tensor | None = None) -> None:
        numbers = AdamWStep(
            step=100, lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, gradient_divisor=divisor
        )
        adamw("cpu", master, m, v, gradient, numbers, weight)

    def clip_and_step() -> None:
        step(squared_sum(gradient, 0).sqrt().clamp(min=1.0).float())

    @torch.no_grad()
    def torch_step() -> None:
        optimizer.step()
        for to, parameter in zip(weights, parameters, strict=True):
            to.copy_(parameter)

    def torch_clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        torch_step()

    bound, ranges = streams(), (gradient, master, m, v, weight)
    addresses = [ctypes.c_void_p(one.data_ptr()) for one in ranges]
    sizes = ctypes.c_int64(numel), ctypes.c_int64(threads)
    return {
        BOUND: lambda: bound(*addresses, *sizes),
        STEP: step,
        TORCH_STEP: torch_step,
        CLIPPED: clip_and_step,
        TORCH_CLIPPED: torch_clip_and_step,
    }


def streams() -> Callable[..., object]:
    """Compile streams.cpp; return its function."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/streams.so"
        source = Path(__file__).with_name("streams.cpp")
        options = ("-std=c++17", "-O3", "-march=native", "-pthread", "-shared", "-fPIC")
        subprocess.run([compiler, *options, str(source), "-o", library], check=True)
        function: Callable[..., object] = ctypes.CDLL(library).streams
        return function


def measure(calls: Calls, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contender in each round, after a round of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name in calls if number % 2 == 0 else reversed(calls):
            started = time.perf_counter()
            calls[name]()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def report(measured: dict[str, list[float]], millions: int, threads: int, load: float) -> str:
    """Return the medians as markdown."""
    numel, rows = millions << 20, []
    for name, seconds in measured.items():
        median, (low, high) = statistics.median(seconds), median_interval(seconds)
        rate = f"{numel * MOVED / median / 1e9:.1f}" if name in (BOUND, STEP) else ""
        rows.append([name, f"{1e3 * median:.1f}", f"{1e3 * low:.1f} to {1e3 * high:.1f}", rate])
    pairs = {
        "of the streams' rate (goal: 0.9)": (BOUND, STEP),
        "times as fast as torch's step": (TORCH_STEP, STEP),
        "times as fast with clipping (goal: 1.15)": (TORCH_CLIPPED, CLIPPED),
    }
    found = []
    for text, (slower, faster) in pairs.items():
        ratios = [one / other for one, other in zip(measured[slower], measured[faster], strict=True)]
        low, high = median_interval(ratios)
        found.append(f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}) {text}")
    rounds = len(measured[STEP])
    return "\n".join(
        [
            "## AdamW on the CPU",
            "",
            f"{machine()}.",
            f"`python tools/bench/adamw.py`: {millions} x 2^20 parameters, {threads} threads, fp32 gradients, masters "
            f"and moments, bf16 weights. {rounds} rounds, interleaved; medians, with 95% confidence intervals. Ratios "
            "are medians of the rounds' ratios. With clipping, llmtrain sums the squares of the gradient and divides "
            f"by the clipping divisor in the step. torch's side has {TENSORS} parameters. GB/s are the bytes read and "
            f"written, each counted once. Load average of other work at the start: {load:.1f}.",
            "",
            table(["step", "ms", "95% interval", "GB/s"], rows),
            "",
            f"llmtrain's step is {found[1]}, {found[2]}, and runs at {found[0]}.",
        ]
    )


if __name__ == "__main__":
    main()
