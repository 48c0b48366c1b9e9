"""Sharding strategies of llmtrain and of peers on one emulated cluster: bytes between nodes, seconds per step, memory,
loss. `python -m tools.bench.sharding --write docs/benchmarks.md`; needs root and, for that peer, DeepSpeed.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.model.tensors import parameter_count
from llmtrain.plan.facts import Facts
from llmtrain.plan.resolve.model_shape import model_shape
from llmtrain.recipe.load import load_recipe

from tools.bench.labs import answer, write_set
from tools.bench.table import machine, table, write_section
from tools.netlab.lab import Lab
from tools.netlab.spec import plain

# A step without communication: all ranks train alone at the same time.
ALONE = "each rank alone"
PEERS = ("FSDP2", "DeepSpeed ZeRO-3", "FSDP2 hybrid")
STRATEGIES: Mapping[str, tuple[str, ...]] = {
    "stage 0": ("zero.stage=0",),
    "stage 1": ("zero.stage=1",),
    "stage 2": ("zero.stage=2",),
    "stage 3": ("zero.stage=3",),
    "stage 3, breadth-first": ("zero.stage=3", "pipeline.schedule=breadth-first"),
    "mics": ("zero.preset=mics",),
    "zero++": ("zero.preset=zero++",),
    "topo": ("zero.preset=topo",),
}
RECIPE = """
model: {{family: gpt2, layers: 6, hidden: 256, heads: 4, vocab: 2048, tie_embeddings: false}}
data: {{path: {folder}/set, sequence_length: 32}}
train: {{steps: 100000, global_batch: {batch}, microbatch: 1, eval_every: 0}}
optimizer: {{lr: 1.0e-3, weight_decay: 0.0, clip: 0.0, schedule: constant, warmup: 0}}
logging: {{every: 1, dir: {folder}/runs}}
"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One comparison. rate: bandwidth of each node's card. rounds: measured turns of each contestant. turn: steps of a
    turn."""

    nodes: int
    ranks_per_node: int
    rate: str
    accumulation: int
    rounds: int
    peers: tuple[str, ...] = PEERS
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    goals: tuple[tuple[str, str, float], ...] = ()
    turn: int = 1


# goals: (strategy, peer, required speedup).
SETTINGS = (
    Setting(nodes=2, ranks_per_node=2, rate="100mbit", accumulation=1, rounds=3),
    Setting(
        nodes=2, ranks_per_node=2, rate="100mbit", accumulation=4, rounds=3,
        goals=(("stage 3", "DeepSpeed ZeRO-3", 1.4), ("mics", "FSDP2 hybrid", 1.1), ("zero++", "stage 3", 3.0),
               ("stage 3, breadth-first", "stage 3", 2.5)),
        turn=2,
    ),
    Setting(nodes=2, ranks_per_node=2, rate="100mbit", accumulation=16, rounds=1, peers=PEERS[1:]),
    Setting(nodes=2, ranks_per_node=2, rate="10mbit", accumulation=16, rounds=2, peers=(),
            strategies=("zero++", "topo"), goals=(("topo", "zero++", 1.7),)),
)  # fmt: skip


def measure(setting: Setting) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the measurements of `sharding_ranks` by contestant, and the bytes of all weights in fp32."""
    with tempfile.TemporaryDirectory() as name, Lab(plain(setting.nodes, setting.ranks_per_node, setting.rate)) as lab:
        folder = Path(name)
        write_set(folder / "set", 2048, 200)
        recipe = folder / "bench.yaml"
        recipe.write_text(RECIPE.format(folder=folder, batch=lab.spec.world * setting.accumulation))
        wanted = {
            "recipe": str(recipe),
            "accumulation": setting.accumulation,
            "rounds": setting.rounds,
            "turn": setting.turn,
            "peers": (*setting.peers, ALONE),
            "strategies": {key: STRATEGIES[key] for key in setting.strategies},
        }
        found = answer(lab, ["tools.bench.sharding_ranks", json.dumps(wanted)], {"DS_ACCELERATOR": "cpu"})
        model = model_shape(load_recipe(str(recipe), []), Facts(world=lab.spec.world, device="cpu"))
    return found, 4 * parameter_count(model)


def report(setting: Setting, found: dict[str, dict[str, Any]], weights: int) -> str:
    """Return the table of one comparison."""
    rate = float(setting.rate.removesuffix("mbit")) * 1e6 / 8
    seconds = {name: statistics.median(figures["seconds"]) for name, figures in found.items()}
    rows = []
    for name, figures in found.items():
        sent = statistics.median(figures["sent"])
        wire = sent / rate
        rows.append(
            (
                name,
                f"{sent / 1e6:.1f}",
                f"{sent / weights:.2f}",
                f"{seconds[name]:.2f}",
                f"{wire:.2f}",
                f"{seconds[name] / max(wire, seconds[ALONE]):.2f}",
                f"{figures['state_bytes'] / 1e6:.1f}",
                f"{figures['losses'][-1]:.4f}" if figures["losses"] and name != ALONE else "",
            )
        )
    header = (
        "strategy",
        "MB sent by a node",
        "of the weights",
        "seconds per step",
        "seconds on the wire",
        "step / lower bound",
        "MB of model states per rank",
        f"loss of step {setting.rounds * setting.turn + 1}",
    )
    results = [
        f"{ours} is {seconds[theirs] / seconds[ours]:.2f} times as fast as {theirs} (goal: {goal})."
        for ours, theirs, goal in setting.goals
    ]
    return (
        f"{setting.nodes} nodes x {setting.ranks_per_node} ranks, {setting.rate}/s between nodes, accumulation "
        f"{setting.accumulation}, {weights / 1e6:.1f} MB of weights, {setting.rounds} turns of {setting.turn}:\n\n"
        f"{table(header, rows)}\n\n{' '.join(results)}"
    ).rstrip()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--accumulation", type=int, help="measure one setting, by the other options, instead of all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn", type=int, default=2)
    parser.add_argument("--peers", nargs="*", default=PEERS)
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    one = Setting(
        nodes=given.nodes, ranks_per_node=given.ranks_per_node, rate=given.rate, accumulation=given.accumulation or 1,
        rounds=given.rounds, peers=tuple(given.peers), strategies=tuple(given.strategies), turn=given.turn,
    )  # fmt: skip
    parts = []
    for setting in [one] if given.accumulation else SETTINGS:
        parts.append(report(setting, *measure(setting)))
        print(parts[-1], flush=True)
    if given.write:
        head = (
            f"## Sharding\n\n{machine(['torch', 'deepspeed'])}. A GPT of 6 layers, hidden 256, sequence 32, fp32, on "
            "an emulated cluster; contestants interleaved in turns of consecutive steps, medians. The lower bound is a "
            "step's bytes divided by the link's rate, or the time of the same computation without communication, "
            "whichever is larger (goal: within 1.15 of it). With mics and topo, the traffic between nodes once per "
            "step can overlap only with the last microbatch, so with accumulation the two times add up. Communication "
            "inside a node uses the same two cores; llmtrain's goes through shared memory."
        )
        write_section(given.write, "sharding", "\n\n".join([head, *parts]))


if __name__ == "__main__":
    main()
