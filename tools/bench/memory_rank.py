"""One rank of the memory benchmark: trains a recipe to its end, and prints planned and measured bytes as JSON.

Measured is the peak of the memory that belongs to this process alone: without mapped files, which are mostly torch's
libraries, and with its share of the memory that ranks share.
"""

import json
import logging
import os
import re
import sys
from pathlib import Path

import torch
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import connect, disconnect
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import memory_budget
from llmtrain.plan.resolve.prepare import check_and_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.training import loop
from llmtrain.training.run import Run


def figures(path: str) -> dict[str, int]:
    """Return the sizes in a file of /proc/self, in bytes."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/self", path).read_text(), re.MULTILINE)
    return {name: 1024 * int(size) for name, size in lines}


def main(recipe: str, overrides: list[str]) -> None:
    """Train this rank."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    ranks = connect(Layout({Axis.DATA: world}))
    plan = check_and_plan(load_recipe(recipe, overrides), Facts(world=world, device="cpu", ranks_per_node=world))
    train_step, seen = loop.train_step, dict[str, int]()

    def watched(run: Run, step: int) -> bool:
        stopping = train_step(run, step)
        seen.update(figures("status"))
        seen.update(figures("smaps_rollup"))
        return stopping

    loop.train_step = watched
    loop.train(plan, ranks.on_grid(plan.grid, plan.tiers), [])
    pipeline = plan.grid.coordinate(rank, Axis.PIPELINE)
    rows = [row for row in memory_budget(plan).rows if row.role.pipeline == pipeline]
    peak = figures("status")["VmHWM"] - seen["RssFile"] - seen["RssShmem"] + seen["Pss_Shmem"]
    planned = dict(max(rows, key=lambda row: row.total).device)
    print(json.dumps({"planned": planned, "measured": peak, "seen": seen}), flush=True)
    disconnect(ranks)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
