"""The buffers that a plan has against what runs take of them: every pool, on every rank, to the byte."""

from typing import Any

import pytest
from llmtrain.plan.collective_buffers import COLLECTIVE_SLOT_BYTES, CollectiveBuffers
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.checkpoint_copies import copy_bytes
from llmtrain.plan.per_rank.roles import roles
from llmtrain.plan.placement import PAGE
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.pools import Pools, pool_bytes
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import load_recipe

from tests.ranks.harness import Case, Trained, soak_except
from tests.ranks.strategies import COVERING as SHARDED
from tests.ranks.strategies import FURTHER as FURTHER_SHARDED
from tests.ranks.strategies import INT4, NARROW_SUMS, WIDE_SUMS
from tests.ranks.test_grid import COVERING as GRIDS
from tests.ranks.test_grid import FURTHER, FURTHER_QUANTIZED, QUANTIZED, grid
from tests.ranks.test_handed import counted

HALF = "precision.compute=bf16"
NARROW = (
    [
        Case(4, (keys, HALF), node=node, accumulation=2)
        for keys in ("zero.stage=1", "zero.stage=2", "zero.stage=3", "zero.preset=mics", "zero.preset=topo")
        for node in (1, 2, 4)
    ]
    + NARROW_SUMS
    + WIDE_SUMS[::3]
)
FLAT = [Case(4, ("zero.stage=3", "zero.hierarchical=false", HALF), node=node) for node in (1, 2)]
OFFLOAD = [
    Case(2, ("zero.stage=1", "offload.optimizer=host", "offload.share=0.3")),
    Case(2, ("zero.stage=2", "offload.optimizer=nvme", "offload.paths=[.]", "offload.bucket=2048")),
    Case(2, ("zero.stage=1", "offload.parameters=nvme", "offload.paths=[.]", HALF)),
    Case(2, ("zero.stage=3", "offload.parameters=host", "zero.secondary=2")),
]
# Stages on other machines, whose receives are posted ahead.
APART = [
    grid(1, 2, 2, schedule="1f1b", node=2),
    grid(1, 2, 1, schedule="message-driven", node=1),
    grid(1, 4, 1, schedule="zero-bubble-v", node=2),
    grid(1, 2, 1, schedule="interleaved", node=1),
]
# Buffers that hold sums over several passes.
RUNS = [
    grid(1, 1, 4, "zero.stage=3", HALF, schedule="breadth-first", node=2),
    grid(2, 1, 2, "zero.stage=2", HALF, "pipeline.chunks=3", schedule="breadth-first", sequence=True),
    grid(1, 2, 2, "zero.stage=2", HALF, INT4, schedule="breadth-first"),
]
OWN = [*NARROW, *FLAT, *OFFLOAD, *APART, *RUNS]
# Those that train for other tests, and short runs.
SOON = [*(case for case, _ in SHARDED), *GRIDS, *QUANTIZED, *map(counted, OWN)]
LATER = [*(case for case, _ in FURTHER_SHARDED), *FURTHER, *FURTHER_QUANTIZED, *OWN]


@pytest.mark.parametrize("case", soak_except(SOON, dict.fromkeys(SOON + LATER)), ids=str)
def test_what_is_taken_is_what_is_planned(case: Case, trained: Trained) -> None:
    result = trained(case)
    facts = Facts(world=case.world, device="cpu", ranks_per_node=case.node or case.world)
    plan = make_plan(load_recipe(str(result.folder / "recipe.resolved.yaml")), facts)
    copies = max(copy_bytes(plan, role) for role in roles(plan))
    assert max(count for rank in result.notes("copies") for count in rank) == copies
    for rank, found in enumerate(result.notes("high_water")):
        programs = Programs(ProgramSpec.of(plan, rank))
        pools = Pools.of(plan, rank, programs)
        elements = {"gathered_weights": programs.step.weights, "gradient_buffers": programs.step.gradients}
        sizes = {"gathered_weights": plan.compute_bytes, "gradient_buffers": plan.buffered_gradient_bytes}
        buffers = {name: count * sizes[name] for name, count in elements.items()}
        planned = {**buffers, **pool_bytes(plan, rank, programs)}
        # Slots of messages and posted receives count from the first message on.
        if plan.pipeline.schedule.message_driven:
            # How many receives are posted depends on the order in which messages arrive.
            assert found["receives"] <= planned["receives"]
            planned["receives"] = found["receives"]
        assert found["receives"] == planned["receives"]
        assert found["last"] == planned
        assert found["built"] == {**planned, "messages": 0, "receives": 0}
        assert found["buffers"] == buffers
        (lanes,) = pools.lanes.values()
        named = {f"{lane.kind} {lane.span}": taking for lane, taking in lanes.items()}
        taken = found["workspaces"]
        assert taken.pop("gathers") == pools.in_flight.weights
        assert taken.pop("reductions") == pools.in_flight.gradients
        shared = found["rounds"].keys()
        assert taken == {
            name: taking.workspace("shared" if name in shared else "gloo") for name, taking in named.items()
        }
        for name, passed in found["rounds"].items():
            each: dict[Any, CollectiveBuffers] = {**named, **pools.groups}
            assert min(max(-(-passed // PAGE), 1) * PAGE, COLLECTIVE_SLOT_BYTES) == each[name].slot_bytes
