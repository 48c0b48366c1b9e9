"""llmtrain's pipeline schedules and torch.distributed.pipelining's 1F1B on four ranks of this machine: seconds per
step, bubble compared to the simulated timeline, live activations.
`python -m tools.bench.pipeline --write docs/benchmarks.md`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast, get_args

import numpy as np
from llmtrain.plan.pipeline.schedules import make_schedule
from llmtrain.plan.pipeline.timeline import Durations, Timeline, simulate, simulate_message_driven
from llmtrain.recipe.pipeline import ScheduleName
from llmtrain_data.indexed import IndexedWriter

from tools.bench.table import machine, table, write_section

RANKS, LAYERS, MICROBATCHES = 4, 8, 8
OURS: ScheduleName = "1f1b"
PEER = "torch"
RECIPE = """
model: {{family: gpt2, layers: {layers}, hidden: {hidden}, heads: 4, vocab: 512, tie_embeddings: false}}
data: {{path: {folder}/set, sequence_length: {sequence}}}
train: {{steps: 100000, global_batch: {batch}, microbatch: 1, eval_every: 0}}
parallel: {{pipeline: {ranks}}}
pipeline: {{split: uniform}}
optimizer: {{lr: 1.0e-3, weight_decay: 0.0, clip: 0.0, schedule: constant, warmup: 0}}
logging: {{every: 1, dir: {folder}/runs}}
"""
Found = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Setting:
    """One comparison. pace: seconds that each block sleeps in its forward pass, in the backward pass of its inputs and
    in that of its weights. rounds: measured steps of each contestant."""

    hidden: int
    sequence: int
    pace: float
    rounds: int
    schedules: tuple[ScheduleName, ...]

    def __str__(self) -> str:
        size = f"hidden {self.hidden}, {self.sequence} tokens a microbatch"
        if self.pace:
            return (
                f"Each block also sleeps {1e3 * self.pace:.0f} ms in its forward pass, in the backward pass of its "
                "inputs and in that of its weights, so that the ranks overlap as on separate processors "
                f"({size}):"
            )
        return f"Without sleeping; the ranks share this machine's cores ({size}):"


SETTINGS = (Setting(128, 128, 0.010, 5, get_args(ScheduleName)), Setting(256, 128, 0.0, 15, (OURS,)))


def measure(setting: Setting) -> dict[str, Found]:
    """Return the measurements of `pipeline_ranks`, for passes and for whole steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = IndexedWriter(folder / "set", np.dtype(np.uint16))
        writer.add(np.random.default_rng(0).integers(0, 512, 400_000), np.full(200, 2000))
        writer.commit()
        recipe = folder / "bench.yaml"
        recipe.write_text(
            RECIPE.format(
                layers=LAYERS, hidden=setting.hidden, folder=folder, sequence=setting.sequence, batch=MICROBATCHES,
                ranks=RANKS,
            )
        )  # fmt: skip
        wanted = {
            "world": RANKS,
            "recipe": str(recipe),
            "schedules": setting.schedules,
            "whole": (PEER, OURS),
            "pace": setting.pace,
            "rounds": setting.rounds,
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        done = subprocess.run(
            [*command, "-m", "tools.bench.pipeline_ranks", json.dumps(wanted)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(done.stderr[-10_000:])
    return json.loads(lines[-1])


def timeline(name: str, by_kind: Mapping[str, list[float]], transfer: float) -> Timeline:
    """Simulate a schedule with the durations measured in one step. transfer: seconds of a message."""
    forward = by_kind["F"]
    known = Durations(forward, by_kind["B"], by_kind["W"], [transfer] * (len(forward) - 1))
    if name == "message-driven":
        return simulate_message_driven(RANKS, MICROBATCHES, RANKS, known, hands_back=True)
    schedule = make_schedule(cast(ScheduleName, name), RANKS, len(forward) // RANKS, MICROBATCHES)
    return simulate(replace(schedule, hands_back=True), known)


def ratio(found: Found, name: str, other: str) -> float:
    """Return the duration of the steps of `name` relative to those of `other`: the median ratio within a round."""
    return median(a / b for a, b in zip(found[name]["seconds"], found[other]["seconds"], strict=True))


def report(setting: Setting, found: Mapping[str, Found]) -> str:
    """Return the table of one comparison, and its results relative to the goals."""
    passes, rows, off = found["passes"], [], {}
    for name, figures in passes.items():
        chunks, fit = len(figures["durations"][0]["F"]) // RANKS, ["", ""]
        if name != PEER:
            simulated = [timeline(name, step, figures["transfer"]).bubble for step in figures["durations"]]
            quotient = median(a / b for a, b in zip(figures["bubbles"], simulated, strict=True))
            fit, off[name] = [f"{median(simulated):.3f}", f"{quotient:.3f}"], abs(quotient - 1)
        rows.append(
            (
                "torch's 1f1b" if name == PEER else name,
                f"{median(figures['seconds']):.3f}",
                f"{ratio(passes, name, OURS):.3f}",
                f"{median(figures['cpu']):.2f}",
                f"{median(figures['bubbles']):.3f}",
                *fit,
                " ".join(f"{live / chunks:g}" for live in figures["live"]),
            )
        )
    header = (
        "schedule",
        "seconds per step",
        f"of {OURS}'s",
        "CPU seconds",
        "bubble",
        "timeline's",
        "ratio",
        "live activations, in microbatches, by rank",
    )
    fits = ""
    if setting.pace:
        fits = (
            f" Its bubble differs from the timeline's by {off[OURS]:.1%} (goal: 10%), at most {max(off.values()):.1%}."
        )
    return (
        f"{setting}\n\n{table(header, rows)}\n\n"
        f"{OURS} is {ratio(passes, PEER, OURS):.3f} times as fast as torch's in the passes alone, and "
        f"{ratio(found['whole'], PEER, OURS):.3f} times in whole optimizer steps (goal: 1.0).{fits}"
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    load, parts = os.getloadavg()[0], []
    for setting in SETTINGS:
        parts.append(report(setting, measure(setting)))
        print(parts[-1], flush=True)
    if given.write:
        head = (
            f"## Pipeline\n\n`python -m tools.bench.pipeline`. {machine()}. A GPT of {LAYERS} layers, fp32, in "
            f"{RANKS} stages on ranks of one thread each, {MICROBATCHES} microbatches of one sequence. Forward and "
            "backward passes of each step, contestants interleaved; medians, ratios within a round. The bubble is the "
            "share of the ranks' time in which no action runs, from the first stage's start to the last one's end. "
            "The timeline's bubble is that of the simulated schedule. The simulation takes the mean durations measured "
            "in the same step, and the median time of messages that a rank waited for. The measured bubble includes "
            "a rank's work between actions; the timeline's does not. After its forward passes, a rank of llmtrain "
            "sends back the gradient of its inputs before it computes those of its weights; torch's rank sends it "
            "after both. Whole steps: llmtrain's include gradient norm, logging and its own AdamW; torch's include "
            f"only its fused AdamW. Load average of other work at the start: {load:.1f}."
        )
        write_section(given.write, "pipeline", "\n\n".join([head, *parts]))


if __name__ == "__main__":
    main()
