"""One rank of many runs, one after another: trains each case of a list and leaves what became of it.

Started as `worker.py CASES RESULTS` with the environment of torchrun. CASES: JSON list of {key, recipe, overrides,
ranks_per_node}; the main rank writes RESULTS: {key: {losses, weights digest...}}, or the sentence of an error.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from llmtrain.checkpoint.convert.hf_config import read_hf_config
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.ranks import Ranks, connect, disconnect
from llmtrain.recipe.prepare import prepared
from llmtrain.recipe.resolve import Facts
from llmtrain.train import train


def run_case(case: dict[str, Any], ranks: Ranks) -> None:
    facts = Facts(world=ranks.layout.world, device="cpu", ranks_per_node=case["ranks_per_node"])
    recipe = prepared(case["recipe"], case["overrides"], facts, read_hf_config)
    train(recipe, replace(ranks, tiers=facts.tiers), [])


def main(cases: Path, world: int) -> None:
    torch.set_num_threads(1)
    ranks = connect(Layout({Axis.DATA: world}))
    for case in json.loads(cases.read_text()):
        run_case(case, ranks)
    disconnect(ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
