"""Bytes between nodes per optimizer step, of every way to spread model states: counted at the network card of a node of
an emulated cluster, beside our closed form and the papers'. `python -m tools.bench.wire --write docs/benchmarks.md`;
needs root.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.labs import answer, write_set
from tools.bench.table import table, write_section
from tools.netlab.lab import Lab
from tools.netlab.spec import plain

# Blocks make up 99.3% of the weights, so that what only the other units save does not blur a closed form.
BLOCKS = 12
RECIPE = """
model: {{family: llama, layers: {blocks}, hidden: 192, heads: 4, ffn: 768, vocab: 128, tie_embeddings: false}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: {steps}, global_batch: 1, microbatch: 1, eval_every: 0}}
precision: {{compute: bf16}}
optimizer: {{warmup: 0}}
logging: {{every: 1, dir: {folder}/runs}}
"""
# The first step records the order in which units are needed; the second goes by it, as all others would.
STEPS = 2
HEAD = """## Bytes between nodes

`python -m tools.bench.wire`. What one node sends in an optimizer step, counted at its network card, headers included,
in M, the bytes of all weights in 16 bits (14.3 MB here, bf16). "ours" and "paper" are closed forms, (p - k) / p of M
for a gather or reduction that crosses nodes by a hop of its own, (p - 1) / p for one in a ring of all ranks;
`tools/bench/wire.py` has them with their sources. Headers: the cards count {headers} more than the runs' own byte
meters, the more the smaller the messages. Beside "ours" they count {beside}."""
# How long a card is silent when a step's last bytes have passed, in seconds.
SILENCE = 0.05


@dataclass(frozen=True)
class Setting:
    """A cluster's shape, and microbatches per optimizer step."""

    nodes: int
    ranks_per_node: int
    microbatches: int

    @property
    def ranks(self) -> int:
        """All ranks together."""
        return self.nodes * self.ranks_per_node

    @property
    def hops(self) -> float:
        """Share of M that a node sends in a gather or reduction that goes across nodes by a hop of its own, (p - k) / p
        (MiCS, section 3.3)."""
        return (self.ranks - self.ranks_per_node) / self.ranks

    @property
    def gathers(self) -> float:
        """Gathers of all weights in a step of ZeRO-3: two in each microbatch, but where forward and backward passes
        turn into each other one block is still there."""
        return 2 * self.microbatches - (2 * self.microbatches - 1) / BLOCKS

    @property
    def ring(self) -> float:
        """Share of M that a node sends in a gather or reduction of all ranks in one ring, (p - 1) / p."""
        return (self.ranks - 1) / self.ranks


Form = Callable[[Setting], float]
INT8, SECOND, INT4 = "quantize.weights=int8", "quantize.secondary=int8", "quantize.gradients=int4"


@dataclass(frozen=True)
class Strategy:
    """A strategy's keys, and what a node sends to others in a step, in M, the bytes of all weights in bf16: by what we
    send, and by what the paper it is from says."""

    keys: tuple[str, ...]
    ours: Form
    paper: Form


def _partition(weights: int, gradients: int, optimizer: int) -> tuple[str, ...]:
    return (f"zero.partition={{weights: {weights}, gradients: {gradients}, optimizer: {optimizer}}}",)


def strategies(nodes: int, ranks_per_node: int) -> Mapping[str, Strategy]:
    """Return every strategy by name.

    A gather or reduction over all ranks moves M; of INT8 M / 2, of INT4 M / 4 (ZeRO++, section 3). Papers: ZeRO-0 and 1
    all-reduce gradients, or reduce-scatter them and gather weights, once a step; ZeRO-2 reduces in every microbatch;
    ZeRO-3 moves 3 M in each (ZeRO, section 7). MiCS all-reduces gradients over the nodes once a step (section 3.4), and
    so does ZeRO-topo, in 16 bits, which then gathers weights of 8 bits (section V). Ours goes across nodes by a hop of
    its own; sums go no farther than to the optimizer's shard; a secondary copy serves the forward passes of all
    microbatches but the first.
    """
    return {**_zero_strategies(), **_node_strategies(nodes * ranks_per_node, ranks_per_node)}


def _zero_strategies() -> dict[str, Strategy]:
    stage3, second = ("zero.stage=3",), ("zero.stage=3", "zero.secondary=node")
    return {
        "stage 0": Strategy(("zero.stage=0",), lambda s: 2 * s.hops, lambda s: 2 * s.ring),
        "stage 1": Strategy(("zero.stage=1",), lambda s: 2 * s.hops, lambda s: 2 * s.ring),
        "stage 2": Strategy(
            ("zero.stage=2",), lambda s: (s.microbatches + 1) * s.hops, lambda s: (s.microbatches + 1) * s.ring
        ),
        "stage 3": Strategy(
            stage3, lambda s: (s.gathers + s.microbatches) * s.hops, lambda s: 3 * s.microbatches * s.ring
        ),
        "stage 3, gathers in one ring": Strategy(
            (*stage3, "zero.hierarchical=false"),
            lambda s: s.gathers * s.ring + s.microbatches * s.hops,
            lambda s: 3 * s.microbatches * s.ring,
        ),
        "stage 3, secondary of a node": Strategy(
            second, lambda s: (1 + s.microbatches) * s.hops, lambda s: 2 * s.microbatches * s.ring
        ),
        "stage 3, INT8 weights": Strategy(
            (*stage3, INT8),
            lambda s: (0.5 * s.gathers + s.microbatches) * s.hops,
            lambda s: 2 * s.microbatches * s.ring,
        ),
        "stage 3, INT8 secondary": Strategy(
            (*second, SECOND), lambda s: (1 + s.microbatches) * s.hops, lambda s: 2 * s.microbatches * s.ring
        ),
        "stage 3, INT4 gradients": Strategy(
            (*stage3, INT4),
            lambda s: (s.gathers + 0.25 * s.microbatches) * s.hops,
            lambda s: s.microbatches * (2 * s.ring + 0.25 * s.hops),
        ),
        "zero++": Strategy(
            ("zero.preset=zero++",),
            lambda s: (0.5 + 0.25 * s.microbatches) * s.hops,
            lambda s: s.microbatches * (0.5 * s.ring + 0.25 * s.hops),
        ),
    }


def _node_strategies(all_ranks: int, node: int) -> dict[str, Strategy]:
    found = {
        "mics": Strategy(("zero.preset=mics",), lambda s: 2 * s.hops, lambda s: 2 * s.hops),
        f"partition ({node}, {node}, {all_ranks})": Strategy(
            _partition(node, node, all_ranks), lambda s: 2 * s.hops, lambda s: 2 * s.hops + s.ring
        ),
        "topo": Strategy(("zero.preset=topo",), lambda s: 0.75 * s.hops, lambda s: 2 * s.hops + 0.5 * s.ring),
    }
    if node == 4:
        within = _partition(2, node, all_ranks)
        found[f"partition (2, {node}, {all_ranks})"] = Strategy(
            within, lambda s: 2 * s.hops, lambda s: 2 * s.hops + s.ring
        )
        found["partition (2, 2, 2)"] = Strategy(
            _partition(2, 2, 2), lambda s: 2 * s.hops, lambda s: 2 * (s.ranks - 2) / s.ranks
        )
        found[f"topo (2, {node}, {all_ranks})"] = Strategy(
            (*within, "zero.secondary=2", INT8, SECOND, INT4),
            lambda s: 0.75 * s.hops,
            lambda s: 2 * s.hops + 0.5 * s.ring,
        )
    return found


@dataclass(frozen=True)
class Sent:
    """What a node sent to others in one step, in M. counted: by the card, headers included. metered: by the run's own
    byte meter."""

    counted: float
    metered: float


def measure(nodes: int, ranks_per_node: int, microbatches: tuple[int, ...]) -> dict[tuple[str, int], Sent]:
    """Train every strategy with so many microbatches, one after another, and return what was sent."""
    with tempfile.TemporaryDirectory() as name, Lab(plain(nodes, ranks_per_node)) as lab:
        folder = Path(name)
        write_set(folder / "set", 128, 20)
        (folder / "wire.yaml").write_text(RECIPE.format(folder=folder, steps=STEPS, blocks=BLOCKS))
        runs = {
            f"{number}-{count}": [*strategy.keys, f"train.global_batch={lab.spec.world * count}"]
            for number, strategy in enumerate(strategies(nodes, ranks_per_node).values())
            for count in microbatches
        }
        wanted = json.dumps({"recipe": str(folder / "wire.yaml"), "runs": runs})
        counted = answer(lab, ["tools.bench.wire", "--rank", wanted])
        found = {}
        for number, (label, strategy) in enumerate(strategies(nodes, ranks_per_node).items()):
            for count in microbatches:
                run = folder / "runs" / f"{number}-{count}"
                weights = 2 * json.loads((run / "run.json").read_text())["parameters"]
                metered = _metered(run, strategy, lab.spec.world, ranks_per_node)
                found[label, count] = Sent(counted[run.name] / weights, metered / weights)
        return found


def _metered(run: Path, strategy: Strategy, ranks: int, ranks_per_node: int) -> float:
    """Return what a node's ranks together sent to others in the last step, by the first one's metrics, in bytes."""
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    metered = ranks_per_node * row["comm_sent_bytes"]["all"]
    if "zero.hierarchical=false" in strategy.keys:
        # Of a ring through all ranks one link leaves each node, whichever rank it is of.
        metered -= (ranks_per_node - 1) * row["comm_bytes"]["weights"]["all_gather"] * (ranks - 1) / ranks
    return float(metered)


def rank_main(wanted: dict[str, Any]) -> None:
    """Be one rank: train all runs; the first rank prints the bytes that its node sent in the last step of each."""
    import torch
    import torch.distributed as dist
    from llmtrain.cluster.layout import Axis, Layout
    from llmtrain.comm.ranks import connect, disconnect
    from llmtrain.training.loop import train_step

    from tools.bench.sharding_ranks import card_bytes, our_run

    torch.set_num_threads(1)
    ranks = connect(Layout({Axis.DATA: int(os.environ["WORLD_SIZE"])}))
    found = {}
    for name, keys in wanted["runs"].items():
        with ExitStack() as stack:
            run = our_run(name, keys, wanted, ranks, stack)
            for step in range(STEPS - 1):
                train_step(run, step)
            _arrive(run)
            before = _when_silent(card_bytes)
            dist.barrier()
            train_step(run, STEPS - 1)
            _arrive(run)
            found[name] = _when_silent(card_bytes) - before
    if ranks.is_main:
        print(json.dumps(found), flush=True)
    disconnect(ranks)


def _arrive(run: Any) -> None:
    """Wait until what a step has sent is everywhere: updated weights travel on after it. Collective."""
    import torch.distributed as dist

    run.engine.weights.finish_updates()
    dist.barrier()


def _when_silent(count: Callable[[], int]) -> int:
    """Return what `count` does once it has stopped changing."""
    last, since = count(), time.monotonic()
    while time.monotonic() < since + SILENCE:
        time.sleep(SILENCE / 10)
        if (now := count()) != last:
            last, since = now, time.monotonic()
    return last


Found = Mapping[tuple[str, int], Sent]


def head(measured: Mapping[tuple[int, int], Found]) -> str:
    """Return what the tables are of, with how far apart counted bytes, metered ones and our forms are. measured: by
    shape."""
    headers, beside = list[float](), list[float]()
    for shape, found in measured.items():
        for (name, count), sent in found.items():
            headers.append(sent.counted / sent.metered - 1)
            beside.append(sent.counted / strategies(*shape)[name].ours(Setting(*shape, count)) - 1)
    return HEAD.format(
        headers=f"{min(headers):.1%} to {max(headers):.1%}", beside=f"{min(beside):+.1%} to {max(beside):+.1%}"
    )


def report(nodes: int, ranks_per_node: int, microbatches: tuple[int, ...], found: Found) -> str:
    """Return the table of one shape."""
    header = ["strategy"]
    for count in microbatches:
        each = "1 microbatch" if count == 1 else f"{count} microbatches"
        header += [f"{each}: measured", "ours", "paper"]
    rows = []
    for name, strategy in strategies(nodes, ranks_per_node).items():
        row = [name]
        for count in microbatches:
            setting = Setting(nodes, ranks_per_node, count)
            row += [f"{found[name, count].counted:.3f}"]
            row += [f"{form(setting):.3f}" for form in (strategy.ours, strategy.paper)]
        rows.append(row)
    return f"{nodes} nodes x {ranks_per_node} ranks:\n\n{table(header, rows)}"


def main() -> None:
    """Print the tables, or be a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        return rank_main(given.rank)
    microbatches = tuple(given.microbatches)
    measured: dict[tuple[int, int], Found] = {}
    for shape in ((2, 2), (2, 4)):
        measured[shape] = measure(*shape, microbatches)
        print(report(*shape, microbatches, measured[shape]), flush=True)
    if given.write:
        tables = [report(*shape, microbatches, found) for shape, found in measured.items()]
        write_section(given.write, "wire", "\n\n".join([head(measured), *tables]))
    return None


if __name__ == "__main__":
    main()
