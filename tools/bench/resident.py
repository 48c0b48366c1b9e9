"""Memory for gathered weights (`zero.resident`) on one emulated cluster: bytes between nodes and seconds per step, by
how many blocks stay gathered. `python -m tools.bench.resident --write docs/benchmarks.md`; needs root.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.plan.facts import Facts
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import load_recipe

from tools.bench.labs import answer, write_set
from tools.bench.table import machine, table, write_section
from tools.netlab.lab import Lab
from tools.netlab.spec import plain

# RATE: bytes per second of a card of 100 Mbit/s.
NODES, RANKS_PER_NODE, RATE, MICROBATCHES = 2, 2, 12.5e6, 4
RANKS = NODES * RANKS_PER_NODE
BLOCKS, STAY = 12, (1, 3, 6, 9, 12)
# Blocks have 99.3% of the weights, so that effects of the other units do not distort the closed form.
RECIPE = """
model: {{family: llama, layers: {blocks}, hidden: 192, heads: 4, ffn: 768, vocab: 128, tie_embeddings: false}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: 100000, global_batch: {batch}, microbatch: 1, eval_every: 0}}
zero: {{stage: 3}}
optimizer: {{lr: 1.0e-3, weight_decay: 0.0, schedule: constant, warmup: 0}}
logging: {{every: 1, dir: {folder}/runs}}
"""
STAGE_2, DEFAULT, ALONE = "stage 2", "default", "each rank alone"
INT8 = ", INT8 secondary copy"
SECONDARY = ("zero.secondary=node", "quantize.secondary=int8")
HEAD = """## Memory for gathered weights

{machine}. `python -m tools.bench.resident`. ZeRO-3 on 2 nodes x 2 ranks, 100 Mbit/s between nodes, accumulation {a},
{blocks} equal blocks, {weights:.1f} MB of weights in fp32; contestants interleaved, medians of {rounds} turns of {turn}
optimizer step(s). `zero.resident` has room for C blocks, the embedding and the head. Bytes that one node sends in a
step are counted at its network card, headers included; M is the bytes of all weights. Closed form:
2a - (2a - 1) C / {blocks} gathers of the weights and a reductions; half of M leaves a node in each. Without
communication, the same step takes {alone:.2f} s."""


def form(stay: int) -> float:
    """Return the bytes that a node sends in a step, in units of all weights. stay: blocks that stay gathered where the
    step turns between forward and backward passes (Belady 1966)."""
    gathers = 2 * MICROBATCHES - (2 * MICROBATCHES - 1) * stay / BLOCKS
    return (gathers + MICROBATCHES) * (RANKS - RANKS_PER_NODE) / RANKS


@dataclass(frozen=True)
class Room:
    """The memory of gathered weights. block, others: bytes of a block, and of the embedding and the head together."""

    block: int
    others: int

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return BLOCKS * self.block + self.others

    def of(self, stay: int) -> str:
        """Return the key with room for `stay` blocks."""
        return f"zero.resident={stay * self.block + self.others}"


def room_of(recipe: str) -> Room:
    """Return the memory that the units of a recipe take once they are gathered."""
    plan = make_plan(load_recipe(recipe, []), Facts(world=RANKS, device="cpu", ranks_per_node=RANKS_PER_NODE))
    sizes = {name: size * plan.compute_bytes for name, size in ProgramSpec.of(plan, 0).padded.items()}
    return Room(sizes["blocks.0"], sizes["embedding"] + sizes["head"])


def contestants(room: Room) -> dict[str, list[str]]:
    """Return the keys of each contestant, by name."""
    found = {STAGE_2: ["zero.stage=2"], DEFAULT: ["zero.resident=0"]}
    found |= {f"C = {stay}": [room.of(stay)] for stay in STAY}
    return found | {f"C = {stay}{INT8}": [room.of(stay), *SECONDARY] for stay in STAY}


def measure(rounds: int, turn: int, rate: str | None = "100mbit") -> tuple[dict[str, dict[str, Any]], Room]:
    """Return the measurements of `sharding_ranks` by contestant, and the memory of gathered weights. rate: bandwidth of
    each node's card."""
    with tempfile.TemporaryDirectory() as name, Lab(plain(NODES, RANKS_PER_NODE, rate)) as lab:
        folder = Path(name)
        write_set(folder / "set", 128, 200)
        recipe = folder / "resident.yaml"
        recipe.write_text(RECIPE.format(folder=folder, blocks=BLOCKS, batch=RANKS * MICROBATCHES))
        room = room_of(str(recipe))
        wanted = {
            "recipe": str(recipe),
            "accumulation": MICROBATCHES,
            "rounds": rounds,
            "turn": turn,
            "peers": [ALONE],
            "strategies": contestants(room),
        }
        return answer(lab, ["tools.bench.sharding_ranks", json.dumps(wanted)]), room


Found = Mapping[str, Mapping[str, Any]]


def report(found: Found, room: Room, rounds: int, turn: int) -> str:
    """Return the section: the text, the table, and what follows from it."""
    sent, seconds = ({name: statistics.median(one[key]) for name, one in found.items()} for key in ("sent", "seconds"))
    first, rows = f"C = {STAY[0]}", []
    stays = {f"C = {stay}": stay for stay in STAY}
    for name in (*stays, DEFAULT, STAGE_2):
        bytes_ratio, time_ratio = sent[name] / sent[first], seconds[name] / seconds[first]
        stay = stays.get(name)
        rows.append(
            (
                name,
                "" if stay is None else f"{(stay * room.block + room.others) / 1e6:.1f}",
                f"{sent[name] / 1e6:.1f}",
                f"{sent[name] / room.weights:.3f}",
                "" if stay is None else f"{form(stay):.3f}",
                f"{seconds[name]:.2f}",
                f"{seconds[name] * RATE / sent[name]:.3f}",
                f"{bytes_ratio:.3f}",
                f"{time_ratio:.3f}",
                f"{time_ratio / bytes_ratio - 1:+.1%}",
            )
        )
    header = (
        "blocks that stay",
        "MB of `zero.resident`",
        "MB sent",
        "in M",
        "closed form",
        "seconds per step",
        "of the seconds on the wire",
        "bytes, of C = 1",
        "time, of C = 1",
        "time to bytes",
    )
    alone = statistics.median(found[ALONE]["seconds"])
    head = HEAD.format(
        machine=machine(), a=MICROBATCHES, blocks=BLOCKS, weights=room.weights / 1e6, rounds=rounds, turn=turn,
        alone=alone,
    )  # fmt: skip
    return "\n\n".join([head, table(header, rows), losses(found)])


def losses(found: Found) -> str:
    """Return a sentence on whether the losses of all steps are equal by bits at all budgets."""
    said = []
    for name, suffix in (("without a secondary copy", ""), ("with one in INT8", INT8)):
        curves = [found[f"C = {stay}{suffix}"]["losses"] for stay in STAY]
        same = "equal" if all(curve == curves[0] for curve in curves) else "not equal"
        said.append(f"{name} they are {same} by bits ({len(curves[0])} steps, the last at {curves[0][-1]:.4f})")
    return f"Losses at the {len(STAY)} budgets: {'; '.join(said)}."


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn", type=int, default=2)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    text = report(*measure(given.rounds, given.turn), given.rounds, given.turn)
    print(text, flush=True)
    if given.write:
        write_section(given.write, "resident", text)


if __name__ == "__main__":
    main()
