"""The peak of a GPU's memory in a step, counted on tensors without values, and as planned. Prints both as JSON.

test_step_peak.py runs this file in a separate process, because it makes torch believe in a GPU. Argument: a list of
cases in JSON, each {preset, world, node, keys}: of ranks on nodes of so many, the first one and the fullest one take
their steps without the others.
"""

import json
import sys
import weakref
from typing import Any
from unittest import mock

# Before torch: it loads the library that stands for a GPU.
from tools.bench import modelled

import torch  # isort: skip
from llmtrain.comm.ranks import Links, Ranks
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import memory_budget
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.prepare import named_facts
from llmtrain.recipe.load import load_recipe
from llmtrain.training.build import build
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.silent_ranks import alone
from tools.tensors import tensors_of

STEPS = 2
KEYS = (
    "data={path: none, sequence_length: 1024}",
    "train={compile: false, global_batch: 8, microbatch: 4}",
    "precision.compute=bf16",
)
# What the plan counts that is no tensor.
OTHERS = ("context", "communicators", "fragmentation")
# torch's allocator rounds up to a multiple of so many bytes.
ROUNDED = 512


class Allocations(TorchDispatchMode):
    """Counts the bytes of memory that tensors on a GPU share. peak: the most at once since the start."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._held = set[int]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **(kwargs or {}))
        for one in tensors_of(found):
            if one.is_cuda and (key := one.untyped_storage()._cdata) not in self._held:
                self._hold(one, key)
        return found

    def _hold(self, tensor: Tensor, key: int) -> None:
        storage = tensor.untyped_storage()
        nbytes = -(-storage.nbytes() // ROUNDED) * ROUNDED
        self._held.add(key)
        self._now += nbytes
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._free, key, nbytes)

    def _free(self, key: int, nbytes: int) -> None:
        self._held.remove(key)
        self._now -= nbytes


def counted(plan: Plan, rank: int) -> int:
    """Return the peak of a rank in a run of some steps."""
    installed = mock.patch.object(modelled.triton_launch, "triton_installed", return_value=True)
    with modelled.device(), alone(plan.grid.world, rank), installed, Allocations() as found:
        ranks = Ranks(rank, 0, plan.grid, torch.device("cuda", 0), Links(tiers=plan.tiers))
        parts = build(plan, ranks, lambda calls: None)
        shape = (plan.batch.sequences, plan.batch.sequence_length + 1)
        rows = torch.zeros(shape, dtype=torch.int64, device=ranks.device)
        for _ in range(STEPS):
            modelled.step(plan, parts, rows)
    return found.peak


def plan_of(preset: str, world: int, node: int, keys: list[str]) -> Plan:
    """Return the plan of a run on cards of 80 GB."""
    model = f"model={{preset: {preset}, positions: 1024, layers: 6}}"
    cluster = f"cluster={{accelerator: {{name: H100, memory: 80GB}}, node: {{ranks: {node}}}}}"
    recipe = load_recipe("gpt2-124m", [model, cluster, *KEYS, *keys])
    facts = Facts(world=world, device="cuda", ranks_per_node=node, triton=True)
    return make_plan(recipe, named_facts(recipe, facts))


def main(preset: str, world: int, node: int, keys: list[str]) -> list[tuple[int, int]]:
    """Return the planned and the counted peak of the first rank, and of the first of the fullest ones, in bytes."""
    plan = plan_of(preset, world, node, keys)
    budget = memory_budget(plan)
    found = list[tuple[int, int]]()
    for rank, row in {one.role.rank: one for one in (budget.rows[0], budget.fullest)}.items():
        planned = sum(nbytes for name, nbytes in row.device.items() if name not in OTHERS)
        found.append((planned, counted(plan, rank)))
    return found


if __name__ == "__main__":
    print(json.dumps([main(**case) for case in json.loads(sys.argv[1])]))
