"""Two ranks that train tiny models with compiled blocks, and count the graphs that torch.compile makes.

`compile_ranks.py WORLD FOLDER` writes `[[case, graphs]]` of each rank into `rank-N.json` in that folder. Its
environment has MASTER_ADDR and MASTER_PORT.
"""

import json
import os
import sys
from functools import partial
from itertools import product
from pathlib import Path

import torch
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import connect, disconnect
from llmtrain.comm.stream import Job, ThreadStream
from llmtrain.plan.facts import Facts
from llmtrain.plan.resolve.prepare import check_and_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.telemetry import about
from llmtrain.training import loop
from torch._dynamo.testing import CompileCounter

from tests.ranks.forks import fork_ranks
from tests.tiny import write_corpus

RECIPE = """
name: tiny
model: {{layers: 4, hidden: 32, heads: 4, vocab: 61}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: 2, global_batch: 8, microbatch: 2, eval_every: 0, compile: true}}
optimizer: {{warmup: 1}}
checkpoint: {{every: 0}}
logging: {{dir: {folder}/runs}}
"""
FAMILIES, STAGES = ("gpt2", "llama", "neox"), (0, 3)
RECOMPUTED = ("none", "full")
CASES = [
    *(
        (f"model.family={family}", f"zero.stage={stage}", f"activation_checkpointing={recomputed}")
        for family, stage, recomputed in product(FAMILIES, STAGES, RECOMPUTED)
    ),
    ("model.family=llama", "zero.stage=3", "train.eval_every=2", "data.split=[50, 50, 0]"),
]


class Done:
    """A ticket of a job that is done."""

    def wait(self) -> None:
        """Return at once."""


def inline(stream: ThreadStream, job: Job) -> Done:
    """Run a job in the thread that submits it, as streams on GPUs do."""
    with torch.no_grad():
        job()
    return Done()


def rank_main(world: int, rank: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    about.measured_peak = lambda device, dtype, budget=0.3: 1e9
    ranks, threads = connect(Layout({Axis.DATA: world})), ThreadStream.submit
    found: list[tuple[str, int]] = []
    compiled = torch.compile
    sharded = [(inline, keys) for keys in CASES if "zero.stage=3" in keys]
    for submit, keys in [*((threads, keys) for keys in CASES), *sharded]:
        ThreadStream.submit = submit  # type: ignore[method-assign, assignment]
        counter, name = CompileCounter(), f"run-{len(found)}"
        torch.compiler.reset()
        torch.compile = partial(compiled, backend=counter)
        recipe = load_recipe(str(folder / "tiny.yaml"), [f"name={name}", *keys])
        plan = check_and_plan(recipe, Facts(world=world, device="cpu", ranks_per_node=world))
        loop.train(plan, ranks.on_grid(plan.grid, plan.tiers), [])
        found.append((f"{' '.join(keys)}{' inline' if submit is inline else ''}", counter.frame_count))
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    ThreadStream.submit = threads  # type: ignore[method-assign]
    disconnect(ranks)


if __name__ == "__main__":
    world, folder = int(sys.argv[1]), Path(sys.argv[2])
    write_corpus(folder / "set", 100, 61)
    (folder / "tiny.yaml").write_text(RECIPE.format(folder=folder))
    sys.exit(fork_ranks(world, lambda rank: rank_main(world, rank, folder)))
