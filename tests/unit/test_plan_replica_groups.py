"""The groups of ranks that hold the same parameters."""

from pathlib import Path

import pytest
from llmtrain.plan.facts import Device, Facts
from llmtrain.plan.per_rank.replica_groups import all_replica_groups, replica_groups
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import load_recipe

RECIPE = """
model: {family: llama, layers: 4, hidden: 64, heads: 4, vocab: 100, tie_embeddings: true}
data: {path: corpus, sequence_length: 32}
train: {global_batch: 16}
parallel: {tensor: 2, pipeline: 2, sequence: true}
quantize: {gradients: int4}
"""


@pytest.fixture
def plan(tmp_path: Path, request: pytest.FixtureRequest) -> Plan:
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    return make_plan(load_recipe(str(tmp_path / "tiny.yaml"), request.param), Facts(world=8, device="cpu"))


@pytest.mark.parametrize("plan", [()], indirect=True)
def test_each_rank_s_groups(plan: Plan) -> None:
    # Ranks 0 to 3 are the first stage, and neighbours are tensor-parallel.
    assert all_replica_groups(plan) == {
        "partial": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "stage": [(0, 1, 2, 3), (4, 5, 6, 7)],
        "tied": [(0, 4), (1, 5), (2, 6), (3, 7)],
    }
    assert replica_groups(plan, 5) == {"partial": (4, 5), "stage": (4, 5, 6, 7), "tied": (1, 5)}


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        (["parallel.sequence=false"], ["stage", "tied"]),
        (["quantize.gradients=none"], ["partial", "tied"]),
        (["model.tie_embeddings=false"], ["partial", "stage"]),
        (["parallel.pipeline=1"], ["partial", "stage"]),
        (["parallel.tensor=1", "parallel.sequence=false"], ["tied"]),
        # One data-parallel rank sends no gradients, so it packs none.
        (["parallel.pipeline=4"], ["partial", "tied"]),
        # One rank holds the first and the last stage.
        (["pipeline.schedule=zero-bubble-v"], ["partial", "stage"]),
    ],
    indirect=["plan"],
)
def test_which_groups_there_are(plan: Plan, names: list[str]) -> None:
    every = all_replica_groups(plan)
    assert list(every) == names
    for rank in range(8):
        own = {name: group for name, groups in every.items() for group in groups if rank in group}
        assert replica_groups(plan, rank) == own
    for groups in every.values():
        held = [rank for group in groups for rank in group]
        assert len(held) == len(set(held))


@pytest.mark.parametrize(
    ("device", "compute", "averaged"), [("cuda", "fp32", True), ("cuda", "bf16", False), ("cpu", "fp32", False)]
)
def test_nccl_s_sums_of_fp32_are_made_equal(device: Device, compute: str, averaged: bool, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    keys = ["quantize.gradients=none", f"precision.compute={compute}"]
    plan = make_plan(load_recipe(str(tmp_path / "tiny.yaml"), keys), Facts(world=8, device=device))
    assert ("stage" in all_replica_groups(plan)) is averaged
