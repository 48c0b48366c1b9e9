"""Training over clusters whose fast networks are not connected: with one pipeline stage per cluster, and with
placements that ignore the clusters. Measures seconds per step and bytes on the network between the clusters.
`python -m tools.bench.clusters --write docs/benchmarks.md`; needs root.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.cluster.load import load_cluster

from tools.bench.labs import environment, write_set
from tools.bench.table import machine, table, write_section
from tools.netlab.lab import Lab
from tools.netlab.spec import of_cluster

# The rates are those of Holmes, table 1, divided by 1000.
DESCRIPTION = """
node: {{ranks: {ranks}}}
clusters:
{clusters}
between: {{kind: ethernet, interface: eth0, bandwidth: 25mbit}}
"""
CLUSTER = "  - {{name: {name}, nodes: {nodes}, nic: {{kind: {kind}, interface: {card}, bandwidth: 200mbit}}}}"
CARDS = (("infiniband", "ib0"), ("roce", "roce0"))
RECIPE = """
model: {{family: gpt2, layers: {layers}, hidden: {hidden}, heads: 4, vocab: 512, tie_embeddings: false}}
data: {{path: {folder}/set, sequence_length: {tokens}}}
train: {{steps: 1, global_batch: {batch}, microbatch: 1, eval_every: 0}}
parallel: {{pipeline: {pipeline}, data: {data}, tensor: {tensor}}}
pipeline: {{split: uniform}}
zero: {{stage: 1}}
precision: {{compute: fp32}}
activation_checkpointing: none
optimizer: {{lr: 1.0e-3, warmup: 0}}
logging: {{every: 1, dir: {folder}/runs}}
"""
HEAD = """## Clusters

`python -m tools.bench.clusters`. {machine}. Clusters of emulated nodes. The nodes of a cluster have a network of 200
Mbit/s that does not reach the other clusters; Ethernet of 25 Mbit/s joins all nodes. The rates are those of Holmes,
table 1 and figure 3, divided by 1000. A GPT of hidden {hidden}, {layers} layers per stage, fp32, ZeRO stage 1, one
stage per cluster, {tokens} tokens per microbatch; `llmtrain run` on every rank, placements interleaved, medians of all
steps except each run's first. "stages in clusters" is Holmes' placement, the result of a cluster file and the default
`parallel.order`. The others use `parallel.order=data-pipeline-tensor`, which puts replicas into different clusters:
with Ethernet for all groups, as without a cluster file, or with a card chosen for each group. "on Ethernet" is what
all nodes together send over it in a step, by their cards' counters, including headers. "stages alone" is the size of
the activations and their gradients, by formula."""
PLACEMENTS: Mapping[str, tuple[str, ...]] = {
    "stages in clusters": ("cluster={cluster}",),
    "anywhere, Ethernet": ("parallel.order=data-pipeline-tensor",),
    "anywhere, card by group": ("parallel.order=data-pipeline-tensor", "cluster={cluster}"),
}
HOLMES, ANYWHERE = list(PLACEMENTS)[:2]
GOAL = 1.38
# Steps of the short run whose bytes are subtracted from those of a longer run.
SHORT = 2


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Clusters of `nodes` nodes with `ranks` tensor-parallel ranks each; one stage per cluster.

    microbatches: per replica and step. layers: per stage.
    """

    clusters: int = 2
    nodes: int = 2
    ranks: int = 1
    microbatches: int = 8
    layers: int = 2
    hidden: int = 256
    tokens: int = 64

    @property
    def stage_bytes(self) -> int:
        """Bytes of activations and their gradients between stages in a step, over all replicas."""
        message = self.tokens * self.hidden * 4
        return 2 * (self.clusters - 1) * self.nodes * self.ranks * self.microbatches * message

    def description(self) -> str:
        """Return the cluster file."""
        cards = [CARDS[index % 2] for index in range(self.clusters)]
        lines = [
            CLUSTER.format(name=f"{kind}{index}", nodes=self.nodes, kind=kind, card=card)
            for index, (kind, card) in enumerate(cards)
        ]
        return DESCRIPTION.format(ranks=self.ranks, clusters="\n".join(lines))

    def recipe(self, folder: Path) -> str:
        """Return the recipe, with its data in `folder`."""
        return RECIPE.format(
            folder=folder,
            layers=self.layers * self.clusters,
            hidden=self.hidden,
            tokens=self.tokens,
            batch=self.nodes * self.microbatches,
            pipeline=self.clusters,
            data=self.nodes,
            tensor=self.ranks,
        )


@dataclass(frozen=True)
class Trained:
    """One run. crossed: bytes that all nodes sent over Ethernet. seconds, losses: one value per step."""

    crossed: int
    seconds: tuple[float, ...]
    losses: tuple[float, ...]


class Bench:
    """A lab for one setting, and runs in it."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting, self._folder, self._runs = setting, folder, 0
        self._description, self._recipe = folder / "clusters.yaml", folder / "bench.yaml"
        self._description.write_text(setting.description())
        self._recipe.write_text(setting.recipe(folder))
        write_set(folder / "set", 512, 100)
        self.lab = Lab(of_cluster(load_cluster(self._description)))

    def train(self, keys: Sequence[str], steps: int) -> Trained:
        """Run the recipe with overrides on every rank. Raises SystemExit if the run fails."""
        self._runs += 1
        name = f"run{self._runs}"
        keys = [key.format(cluster=self._description) for key in keys]
        command = [sys.executable, "-m", "llmtrain", "run", str(self._recipe), f"name={name}", f"train.steps={steps}"]
        result = self.lab.run([*command, *keys], environment(), timeout=300)
        if result.returncode:
            raise SystemExit("\n".join(line for output in result.output for line in output[-20:]))
        rows = (self._folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        found = [row for row in map(json.loads, rows) if "event" not in row]
        return Trained(
            sum(card.sent for card in result.traffic if card.network == "between"),
            tuple(row["step_time_s"] for row in found),
            tuple(row["loss"] for row in found),
        )


def report(setting: Setting, rounds: int, steps: int) -> str:
    """Measure one setting and return its table."""
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(setting, Path(name))
        with bench.lab:
            found: dict[str, list[Trained]] = {placement: [] for placement in PLACEMENTS}
            for turn in range(rounds):
                for placement in list(PLACEMENTS) if turn % 2 else list(reversed(list(PLACEMENTS))):
                    found[placement].append(bench.train(PLACEMENTS[placement], steps))
            short = {placement: bench.train(keys, SHORT).crossed for placement, keys in PLACEMENTS.items()}
    # Subtract the bytes of a short run, so that the traffic at a run's start and end does not count.
    crossed = {placement: (runs[0].crossed - short[placement]) / (steps - SHORT) for placement, runs in found.items()}
    seconds = {placement: [second for run in runs for second in run.seconds[1:]] for placement, runs in found.items()}
    rows = [
        (
            placement,
            f"{statistics.median(seconds[placement]):.2f}",
            f"{min(seconds[placement]):.2f} to {max(seconds[placement]):.2f}",
            f"{statistics.median(seconds[placement]) / statistics.median(seconds[HOLMES]):.2f}",
            f"{crossed[placement] / 1e6:.3f}",
            f"{setting.stage_bytes / 1e6:.3f}" if placement == HOLMES else "",
            f"{runs[0].losses[-1]:.4f}",
        )
        for placement, runs in found.items()
    ]
    header = ("ranks", "s per step", "from, to", "/ first", "MB on Ethernet", "stages alone", f"loss of step {steps}")
    ratio = statistics.median(seconds[ANYWHERE]) / statistics.median(seconds[HOLMES])
    totals = [run.crossed for run in found[HOLMES]]
    # Compare whole runs: their traffic differs at the start and end.
    apart = f"; equal runs differ in total by up to {max(totals) - min(totals):,} bytes" if rounds > 1 else ""
    degrees = f"tensor {setting.ranks} x pipeline {setting.clusters} x data {setting.nodes}"
    return (
        f"{setting.clusters} clusters x {setting.nodes} nodes x {setting.ranks} ranks ({degrees}), "
        f"{setting.microbatches} microbatches, {rounds} runs of {steps} steps each:\n\n{table(header, rows)}\n\n"
        f"A step is {ratio:.2f} times as fast as over Ethernet alone (goal: {GOAL}). The traffic between clusters in a "
        f"step is that of the stages {crossed[HOLMES] - setting.stage_bytes:+,.0f} bytes{apart}."
    )


SETTINGS = (Setting(), Setting(clusters=3))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--settings", type=int, nargs="*", default=list(range(len(SETTINGS))), help="by number")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    usual = SETTINGS[0]
    parts = [HEAD.format(machine=machine(), hidden=usual.hidden, layers=usual.layers, tokens=usual.tokens)]
    for number in given.settings:
        parts.append(report(SETTINGS[number], given.rounds, given.steps))
        print(parts[-1], flush=True)
    if given.write:
        write_section(given.write, "clusters", "\n\n".join(parts))


if __name__ == "__main__":
    main()
