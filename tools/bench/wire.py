"""Bytes between nodes per optimizer step, for every sharding strategy: counted at the network card of a node of an
emulated cluster, and compared to closed forms of llmtrain and of the papers.
`python -m tools.bench.wire --write docs/benchmarks.md`; needs root.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmtrain.plan.facts import Facts
from llmtrain.plan.program.by_rank import programs_of
from llmtrain.plan.program.step_calls import Call, StepCalls
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.recipe.schema import Recipe

from tools.bench.labs import answer, write_set
from tools.bench.table import table, write_section
from tools.netlab.lab import Lab
from tools.netlab.spec import plain

# Blocks have 99.3% of the weights, so that effects of the other units do not distort the closed forms.
BLOCKS = 12
# The memory for gathered weights has room for three blocks. Beside the embedding or the head, two stay.
KEPT = 2
RECIPE = """
model: {{family: llama, layers: {blocks}, hidden: 192, heads: 4, ffn: 768, vocab: 128, tie_embeddings: false}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: {steps}, global_batch: 1, microbatch: 1, eval_every: 0}}
precision: {{compute: bf16}}
optimizer: {{warmup: 0}}
logging: {{every: 1, dir: {folder}/runs}}
"""
# The first step has the update of the initial weights beside its own calls; later steps are equal.
STEPS = 2
HEAD = """## Bytes between nodes

`python -m tools.bench.wire`. Bytes that one node sends in an optimizer step, counted at its network card, including
headers. The unit is M, the bytes of all weights in 16 bits (14.3 MB here, bf16). "ours" and "paper" are closed forms:
(p - k) / p of M for a gather or reduction with a separate hop between nodes, (p - 1) / p for one in a ring of all
ranks; `tools/bench/wire.py` has the forms and their sources. Headers: the cards count {headers} more than the runs'
byte counters, and more for smaller messages. The counted bytes differ from "ours" by {beside}."""
# After this many silent seconds of a card, a step's last bytes have passed.
SILENCE = 0.05


@dataclass(frozen=True)
class Setting:
    """A cluster's shape, and microbatches per optimizer step."""

    nodes: int
    ranks_per_node: int
    microbatches: int

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def hops(self) -> float:
        """Share of M that a node sends in a gather or reduction with a separate hop between nodes, (p - k) / p (MiCS,
        section 3.3)."""
        return (self.ranks - self.ranks_per_node) / self.ranks

    @property
    def gathers(self) -> float:
        """Gathers of all weights in a step of ZeRO-3: two per microbatch, minus the blocks that are still gathered at
        each change between forward and backward passes."""
        return 2 * self.microbatches - (2 * self.microbatches - 1) * KEPT / BLOCKS

    @property
    def ring(self) -> float:
        """Share of M that a node sends in a gather or reduction in one ring of all ranks, (p - 1) / p."""
        return (self.ranks - 1) / self.ranks


Form = Callable[[Setting], float]
INT8, SECOND, INT4 = "quantize.weights=int8", "quantize.secondary=int8", "quantize.gradients=int4"


@dataclass(frozen=True)
class Strategy:
    """A strategy's keys, and closed forms of the bytes that a node sends in a step: llmtrain's, and those of the
    strategy's paper. Their unit is M, the bytes of all weights in bf16."""

    keys: tuple[str, ...]
    ours: Form
    paper: Form


def _partition(weights: int, gradients: int, optimizer: int) -> tuple[str, ...]:
    return (f"zero.partition={{weights: {weights}, gradients: {gradients}, optimizer: {optimizer}}}",)


def strategies(nodes: int, ranks_per_node: int) -> Mapping[str, Strategy]:
    """Return every strategy by name.

    A gather or reduction over all ranks moves M; in INT8 M / 2, in INT4 M / 4 (ZeRO++, section 3). Papers: ZeRO-0 and 1
    all-reduce gradients, or reduce-scatter them and gather weights, once per step; ZeRO-2 reduces in every microbatch;
    ZeRO-3 moves 3 M in each (ZeRO, section 7). MiCS all-reduces gradients between nodes once per step (section 3.4).
    ZeRO-topo does the same in 16 bits, and then gathers weights in 8 bits (section V). llmtrain has a separate hop
    between nodes; it reduces only to the optimizer's shards; a secondary copy serves the forward passes of all
    microbatches except the first. Breadth-first, all microbatches share gathers and reductions (Lamy-Poirier 2023).
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
        "stage 3, breadth-first": Strategy(
            (*stage3, "pipeline.schedule=breadth-first"),
            lambda s: (replace(s, microbatches=1).gathers + 1) * s.hops,
            lambda s: 3 * s.ring,
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
    """Bytes that a node sent in one step, in M. counted: by the card, including headers. metered: by the run's byte
    counter. planned: by the run's plan, call by call."""

    counted: float
    metered: float
    planned: float


def measure(nodes: int, ranks_per_node: int, microbatches: tuple[int, ...]) -> dict[tuple[str, int], Sent]:
    """Train every strategy with each number of microbatches, and return the sent bytes."""
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
                recipe = load_recipe(str(folder / "wire.yaml"), runs[run.name])
                planned = planned_bytes(recipe, lab.spec.world, ranks_per_node)
                found[label, count] = Sent(counted[run.name] / weights, metered / weights, planned / weights)
        return found


def _metered(run: Path, strategy: Strategy, ranks: int, ranks_per_node: int) -> float:
    """Return the bytes that a node's ranks sent together in the last step, from the metrics of the first rank."""
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    metered = ranks_per_node * row["comm_sent_bytes"]["all"]
    if "zero.hierarchical=false" in strategy.keys:
        # In a ring of all ranks, only one rank per node sends to another node.
        metered -= (ranks_per_node - 1) * row["comm_bytes"]["weights"]["all_gather"] * (ranks - 1) / ranks
    return float(metered)


def planned_bytes(recipe: Recipe, world: int, ranks_per_node: int) -> int:
    """Return the bytes that a recipe's plan has the first node's ranks send to other nodes in a step."""
    facts = Facts(world=world, device="cpu", ranks_per_node=ranks_per_node)
    plan = make_plan(recipe, facts)
    programs = programs_of(plan)
    calls = ((rank, call) for rank in range(ranks_per_node) for call in StepCalls(plan, rank, programs(rank)).all())
    return sum(call.times * _crossing(call, rank, ranks_per_node) for rank, call in calls)


def _crossing(call: Call, rank: int, ranks_per_node: int) -> int:
    """Return the bytes of a call that its rank sends to other nodes."""
    nodes = [other // ranks_per_node for other in call.ranks]
    if len(set(nodes)) == 1:
        return 0
    # Either the ranks are each on a node of their own, or they form a ring, in which each sends to the next.
    following = nodes[(call.ranks.index(rank) + 1) % len(nodes)]
    return 0 if following == rank // ranks_per_node else call.traffic.sent


def rank_main(wanted: dict[str, Any]) -> None:
    """The program of one rank: train all runs. The first rank prints its node's sent bytes in the last step of each."""
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
    """Wait until all messages of a step have arrived: sending of updated weights continues after it. Collective."""
    import torch.distributed as dist

    run.engine.weights.updates.finish()
    dist.barrier()


def _when_silent(count: Callable[[], int]) -> int:
    """Return the value of `count` when it has stopped changing."""
    last, since = count(), time.monotonic()
    while time.monotonic() < since + SILENCE:
        time.sleep(SILENCE / 10)
        if (now := count()) != last:
            last, since = now, time.monotonic()
    return last


Found = Mapping[tuple[str, int], Sent]


def head(measured: Mapping[tuple[int, int], Found]) -> str:
    """Return the section's text, with the differences of counted bytes to metered bytes and to llmtrain's forms.
    measured: results by cluster shape."""
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
    """Print the tables, or run as a rank."""
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
