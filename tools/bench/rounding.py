"""Compares ways to round INT4 gradients by the loss of a tiny model over 20 steps.

One process emulates all ranks. It computes their microbatches one after another, rounds their gradients as the two hops
of a reduction do, and compares its losses to those of the same run without rounding. Weights are exact.
`python tools/bench/rounding.py`. It measures no times, so the machine may have other work.
"""

import argparse
import logging
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for tools.bench, if this file runs as a script

import numpy as np
import torch
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import Ranks, connect, disconnect
from llmtrain.launch.stop import StopRequest
from llmtrain.optim.lr_schedule import learning_rate
from llmtrain.plan.facts import Facts
from llmtrain.plan.pipeline.actions import Action
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.sharding.unit import ShardedUnit
from llmtrain.training.loop import forward_backward, optimizer_step
from llmtrain.training.run import open_run
from llmtrain_data.indexed import IndexedWriter
from llmtrain_kernels.quantize.op import Rounding, dequantize, quantize
from llmtrain_kernels.quantize.packed_size import packed_bytes
from torch import Tensor

from tools.bench.table import machine, table, write_section

BATCH, STEPS, MOST = 96, 20, 7
RECIPE = """
name: tiny
model: {{family: llama, layers: 3, hidden: 32, heads: 4, kv_heads: 2, ffn: 96, vocab: 61}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: {steps}, global_batch: {batch}, microbatch: {microbatch}, eval_every: 0}}
optimizer: {{lr: 1.0e-2, warmup: 5}}
logging: {{dir: {folder}}}
seed: {seed}
"""


@dataclass(frozen=True)
class Setting:
    """An emulated cluster. each: reduce between nodes in each microbatch, not once per step."""

    nodes: int
    ranks: int
    accumulation: int
    each: bool

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks

    def __str__(self) -> str:
        preset = "zero++" if self.each else "topo"
        return f"{preset} {self.nodes} x {self.ranks}, accumulation {self.accumulation}"


SETTINGS = (
    Setting(2, 2, 4, each=False), Setting(2, 3, 1, each=True), Setting(2, 4, 4, each=True), Setting(4, 2, 1, each=False)
)  # fmt: skip


@dataclass(frozen=True)
class Method:
    """A way of rounding. scale: absmax / 7; signed absmax / -8; minimum to maximum with a zero point; or the scale with
    the least squared error. own: a rank does not round its own part. feedback: hops with error feedback, which add
    their rounding error to the next gradient.
    """

    rounding: Rounding = "nearest"
    block: int = 2048
    scale: Literal["absmax", "16 codes", "zero point", "least squares"] = "absmax"
    own: bool = False
    feedback: tuple[int, ...] = ()


METHODS = {
    "to nearest, all parts": Method(),
    "stochastic": Method(rounding="stochastic"),
    "error feedback of the second hop": Method(feedback=(1,)),
    "error feedback of both hops": Method(feedback=(0, 1)),
    "all 16 codes, signed scale": Method(scale="16 codes"),
    "all 16 codes, zero point": Method(scale="zero point"),
    "scales of least squared error": Method(scale="least squares"),
    "blocks of 256": Method(block=256),
    "blocks of 64": Method(block=64),
    "own part exact": Method(own=True),
    "own part exact, stochastic": Method(own=True, rounding="stochastic"),
    "own part exact, error feedback of both hops": Method(own=True, feedback=(0, 1)),
    "own part exact, scales of least squared error": Method(own=True, scale="least squares"),
    "own part exact, blocks of 256": Method(own=True, block=256),
    "own part exact, blocks of 256, stochastic": Method(own=True, block=256, rounding="stochastic"),
    "own part exact, blocks of 64": Method(own=True, block=64),
}


@dataclass
class Reduction:
    """The two-hop reduction of all ranks' gradients."""

    setting: Setting
    method: Method
    _errors: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    _seed: int = 0

    def __call__(self, unit: str, gradients: Tensor) -> Tensor:
        """Return the sum, `[numel]`, of a unit's gradients, `[ranks, accumulation, numel]`."""
        nodes, ranks, numel = self.setting.nodes, self.setting.ranks, gradients.shape[2]
        padding = -numel % (nodes * ranks * 32)
        padded = torch.nn.functional.pad(gradients, (0, padding))
        total = torch.zeros(ranks, nodes, (numel + padding) // (ranks * nodes))
        inside = torch.zeros(nodes, ranks, (numel + padding) // ranks)
        for microbatch in padded.unbind(1):
            inside += self._hop(unit, 0, microbatch.view(nodes, ranks, -1))
            if self.setting.each:
                total = total + self._hop(unit, 1, inside.transpose(0, 1))
                inside = torch.zeros_like(inside)
        if not self.setting.each:
            total = self._hop(unit, 1, inside.transpose(0, 1))
        return total.flatten()[:numel]

    def _hop(self, unit: str, hop: int, values: Tensor) -> Tensor:
        """Reduce-scatter `[groups, members, numel]` within each group; return `[groups, members, part]`."""
        members = values.shape[1]
        parts = values.unflatten(2, (members, -1))
        if hop in self.method.feedback:
            parts = parts + self._errors.get((unit, hop), 0.0)
        rounded = self._rounded(parts.flatten(0, 2)).view_as(parts)
        if self.method.own:
            rounded = torch.where(torch.eye(members, dtype=torch.bool).unsqueeze(2), parts, rounded)
        self._errors[unit, hop] = parts - rounded
        return rounded.sum(1)

    def _rounded(self, rows: Tensor) -> Tensor:
        out = torch.empty_like(rows)
        if self.method.scale != "absmax":
            for columns in torch.arange(rows.shape[1]).split(self.method.block):
                out[:, columns] = SCALES[self.method.scale](rows[:, columns])
            return out
        packed = torch.empty(len(rows), packed_bytes(rows.shape[1], 4, self.method.block), dtype=torch.uint8)
        self._seed += 1
        quantize(rows.contiguous(), 4, self.method.block, packed, self.method.rounding, self._seed)
        dequantize(packed, 4, self.method.block, out)
        return out


def signed_scale(blocks: Tensor) -> Tensor:
    """Round each row, a block; code -8 is the element farthest from zero."""
    scale = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)) / -8
    return (blocks / torch.where(scale == 0, 1.0, scale)).round().clamp(-8, 7) * scale


def zero_point(blocks: Tensor) -> Tensor:
    """Round each row, a block, with 16 codes from its minimum to its maximum; one code is zero."""
    low, high = blocks.amin(1, keepdim=True).clamp_max(0), blocks.amax(1, keepdim=True).clamp_min(0)
    scale = torch.where(high > low, (high - low) / 15, 1.0)
    zero = (-low / scale).round()
    return ((blocks / scale).round().clamp(-zero, 15 - zero)) * scale


def least_squares(blocks: Tensor) -> Tensor:
    """Round each row, a block, with the one of 15 scales that gives the least squared error."""
    absmax = blocks.abs().amax(1, keepdim=True).clamp_min(1e-37)
    scales = absmax * torch.linspace(0.3, 1.0, 15) / MOST
    tried = torch.stack([(blocks / s).round().clamp(-MOST, MOST) * s for s in scales.unsqueeze(1).unbind(2)])
    best = (tried - blocks).square().sum(2).argmin(0)
    return tried[best, torch.arange(len(blocks))]


SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "16 codes": signed_scale, "zero point": zero_point, "least squares": least_squares
}  # fmt: skip


def losses(folder: Path, ranks: Ranks, setting: Setting, seed: int, method: Method | None) -> list[float]:
    """Return the loss of each step. method: None sums gradients without rounding."""
    microbatch = BATCH // setting.world // setting.accumulation
    recipe_file = folder / "tiny.yaml"
    recipe_file.write_text(RECIPE.format(folder=folder, steps=STEPS, batch=BATCH, microbatch=microbatch, seed=seed))
    facts = Facts(world=1, device="cpu")
    plan = make_plan(load_recipe(str(recipe_file), []), facts)
    found = []
    with open_run(plan, ranks, StopRequest()) as run:
        units = run.engine.units
        if method is not None:
            run.engine.backward = keep_separate(run.engine.backward, units, Reduction(setting, method))  # type: ignore[method-assign]
        for step in range(STEPS):
            passes = forward_backward(run, step)
            found.append(float(passes.loss))
            optimizer_step(run, learning_rate(plan.optimizer, step, STEPS), passes)
            run.progress.applied += 1
    return found


def keep_separate(
    backward: Callable[..., None], units: dict[str, ShardedUnit], reduction: Reduction
) -> Callable[..., None]:
    """Wrap `backward`, the backward pass of one microbatch: keep each microbatch's gradients separate, and reduce them
    after the last one."""
    setting = reduction.setting
    kept: dict[str, list[Tensor]] = {name: [] for name in units}

    def run_separate(action: Action, run: Callable[[], None]) -> None:
        for unit in units.values():
            unit.gradient.zero_()
        backward(action, run)
        for name, unit in units.items():
            kept[name].append(unit.gradient.clone())
            if len(kept[name]) == setting.world * setting.accumulation:
                every = torch.stack(kept[name]).view(setting.world, setting.accumulation, -1)
                unit.gradient.copy_(reduction(name, every))
                kept[name].clear()

    return run_separate


def measure(seeds: int) -> list[tuple[str, ...]]:
    """Return one row of the table per method."""
    ranks = connect(Layout({Axis.DATA: 1}))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = IndexedWriter(folder / "set", np.dtype(np.uint16))
        steps = np.random.default_rng(0).integers(1, 4, size=(300, 100))
        writer.add(np.cumsum(steps, axis=1).ravel() % 61, np.full(300, 100))
        writer.commit()
        exact = {
            (setting, seed): losses(folder, ranks, setting, seed, None) for setting in SETTINGS for seed in range(seeds)
        }
        rows = []
        for title, method in METHODS.items():
            cells = [title]
            for setting in SETTINGS:
                off = [
                    [
                        ours / theirs - 1
                        for ours, theirs in zip(
                            losses(folder, ranks, setting, seed, method), exact[setting, seed], strict=True
                        )
                    ]
                    for seed in range(seeds)
                ]
                worst = max(abs(each) for curve in off for each in curve)
                cells.append(f"{worst:.2%}, {statistics.mean(map(statistics.mean, off)):+.2%}")
            rows.append(tuple(cells))
            print(" | ".join(cells), flush=True)
    disconnect(ranks)
    return rows


def report(seeds: int, rows: list[tuple[str, ...]]) -> str:
    """Return the section of the document."""
    return (
        f"## Rounding of gradients\n\n{machine(['torch'])}. `python tools/bench/rounding.py --seeds {seeds}`: INT4 "
        f"gradients of a tiny model ({STEPS} steps, blocks of 2048 by default), compared to the same run without "
        "rounding. Each cell: the largest and the mean relative difference of a step's loss. The columns are nodes x "
        "ranks per node; `topo` reduces between nodes once per step, `zero++` in each microbatch. Limit: 1%, for all "
        f"quantizers together.\n\n{table(('rounding', *map(str, SETTINGS)), rows)}\n\n"
        "Chosen: round to nearest, own part exact (it is never sent), blocks of 256. This takes no memory and no other "
        "format; scales take 1/32 of the payload instead of 1/256. Stochastic rounding and error feedback are "
        "unbiased, but their noise enlarges Adam's second moments, and losses fall more slowly; error feedback also "
        "needs a rank's whole gradients in fp32. Scales of least squared error are the most accurate, but take 15 "
        "passes over each block."
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    text = report(given.seeds, measure(given.seeds))
    if given.write:
        write_section(given.write, "rounding", text)


if __name__ == "__main__":
    main()
