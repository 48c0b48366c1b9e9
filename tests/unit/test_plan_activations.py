"""Planned activations equal those that the model keeps, to the byte."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from llmtrain.model.dtypes import DTYPES
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.activations import (
    deferred_bytes,
    recomputed_peak,
    stage_activations,
    unit_activations,
)
from llmtrain.plan.per_rank.saved_tensors import Sizes, block_tensors
from llmtrain.plan.pipeline.stage_layout import StageLayout
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import parse_recipe
from llmtrain_kernels.native import native_available

from tests.kept import Setup, counted

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "neox": {"rotary_fraction": 0.34},
    "llama": {"kv_heads": 2, "ffn": 46},
}
SEQUENCES, TOKENS, LAYERS = 3, 10, 3


def recipe_of(family: str, **model: Any) -> dict[str, Any]:
    """Return a recipe of a small model with odd sizes. Each stage has three blocks."""
    sizes = {"family": family, "layers": 2 * LAYERS, "hidden": 36, "heads": 6, "vocab": 61, "ffn": 46}
    return {
        "name": "small",
        "model": {**sizes, **FAMILIES[family], **model},
        "data": {"path": "corpus", "sequence_length": TOKENS},
        "train": {"global_batch": 4 * SEQUENCES, "microbatch": SEQUENCES},
    }


def plan_of(recipe: dict[str, Any], ranks: int, **sections: Any) -> Plan:
    """Return the plan of a recipe with further sections."""
    return make_plan(parse_recipe({**recipe, **sections}), Facts(world=ranks, device="cpu", native=native_available()))


RECOMPUTE = {"none": "none", "full": "full", "every 2": {"every": 2}, "by stage": {"every": [2, 3]}}
TENSOR = {"alone": (1, False), "tensor": (2, False), "sequence": (2, True)}
VARIANTS = list(product((False, True), (0.0, 0.1), TENSOR, ("1f1b", "zero-bubble")))


def plans(family: str, compute: str, recompute: str) -> Iterator[Plan]:
    """Yield plans of a pipeline of two stages."""
    for tied, dropout, tensor, schedule in VARIANTS:
        degree, sequence = TENSOR[tensor]
        yield plan_of(
            recipe_of(family, tie_embeddings=tied, dropout=dropout),
            2 * degree,
            precision={"compute": compute},
            activation_checkpointing=RECOMPUTE[recompute],
            parallel={"pipeline": 2, "tensor": degree, "sequence": sequence},
            pipeline={"schedule": schedule},
        )


def setup_of(plan: Plan, deferred: bool) -> Setup:
    """Return how the plan's model computes."""
    degree = plan.grid.world // plan.pipeline.schedule.ranks
    return Setup(plan.model, DTYPES[plan.compute], degree, plan.sequence_parallel, deferred)


def check(plan: Plan, layout: StageLayout) -> None:
    """Compare a stage's planned bytes with the counted ones."""
    rows = torch.arange(plan.batch.microbatch * (plan.batch.sequence_length + 1)) % plan.model.vocab
    planned = deferred_bytes(plan, layout)
    found = counted(setup_of(plan, planned > 0), layout, rows.view(plan.batch.microbatch, -1))
    case = (plan.model, plan.grid, plan.sequence_parallel, plan.pipeline.name, layout)
    assert stage_activations(plan, layout) == found.forward, case
    assert recomputed_peak(plan, layout) == found.recomputed, case
    assert planned == found.deferred, case


# Every pair of a family, a dtype and a way to recompute; the others are soak tests.
STAGES = [
    pytest.param(family, compute, recompute, marks=() if (at + other + last) % 3 == 0 else pytest.mark.soak)
    for (at, family), (other, compute), (last, recompute) in product(
        enumerate(FAMILIES), enumerate(DTYPES), enumerate(RECOMPUTE)
    )
]


@pytest.mark.parametrize(("family", "compute", "recompute"), STAGES)
def test_stages(family: str, compute: str, recompute: str) -> None:
    for plan in plans(family, compute, recompute):
        for layouts in plan.pipeline.stages:
            check(plan, layouts[0])


@pytest.mark.parametrize("tensor", TENSOR)
@pytest.mark.parametrize("family", FAMILIES)
def test_units(family: str, tensor: str) -> None:
    """Each unit as a stage of its own, and the whole model as one stage."""
    degree, sequence = TENSOR[tensor]
    parallel = {"tensor": degree, "sequence": sequence}
    for tied, dropout in product((False, True), (0.0, 0.1)):
        plan = plan_of(recipe_of(family, tie_embeddings=tied, dropout=dropout), degree, parallel=parallel)
        (whole,) = plan.pipeline.stages[0]
        embedding = StageLayout(stage=0, first=0, end=0, opens=True, closes=False, tied=tied)
        block = StageLayout(stage=1, first=1, end=2, opens=False, closes=False, tied=tied)
        head = StageLayout(stage=2, first=6, end=6, opens=False, closes=True, tied=tied)
        for layout, unit in ((embedding, "embedding"), (block, "blocks.1"), (head, "head")):
            check(plan, layout)
            assert unit_activations(plan, layout, unit) == unit_activations(plan, whole, unit)
            assert stage_activations(plan, layout) == unit_activations(plan, layout, unit)
        check(plan, whole)
        assert stage_activations(plan, whole) == sum(unit_activations(plan, whole, unit) for unit in whole.units)


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_sequence_or_one_head(family: str, compute: str) -> None:
    """torch's attention with dropout copies less where there is one sequence or one head."""
    for sequences, heads, dropout in product((1, 3), (1, 6), (0.0, 0.1)):
        recipe = recipe_of(family, heads=heads, kv_heads=heads, dropout=dropout)
        recipe["train"] = {"global_batch": sequences, "microbatch": sequences}
        plan = plan_of(recipe, 1, precision={"compute": compute})
        check(plan, plan.pipeline.stages[0][0])


def check_large(recipe: dict[str, Any], degree: int = 1, **sections: Any) -> None:
    """Check a model with more than 64 MB of saved tensors, with odd sizes and the matrix products of another
    library."""
    plan = plan_of(recipe, degree, **sections)
    layout = plan.pipeline.stages[0][0]
    assert stage_activations(plan, layout) + recomputed_peak(plan, layout) > 64e6
    check(plan, layout)


@pytest.mark.parametrize("family", FAMILIES)
def test_large(family: str) -> None:
    recipe = recipe_of(family, hidden=396, ffn=1100, vocab=5003)
    recipe["data"]["sequence_length"] = 301
    check_large(recipe)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recompute", ["none", "every 2", "full"])
@pytest.mark.parametrize("tensor", TENSOR)
@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_large_in_every_way(family: str, compute: str, tensor: str, recompute: str) -> None:
    degree, sequence = TENSOR[tensor]
    recipe = recipe_of(family, hidden=396, ffn=1100, vocab=5003, dropout=0.1 if recompute == "none" else 0.0)
    recipe["data"]["sequence_length"] = 300 + (tensor == "alone")
    recipe["train"] = {"global_batch": 27, "microbatch": 27}
    parallel, kept = {"tensor": degree, "sequence": sequence}, RECOMPUTE[recompute]
    check_large(recipe, degree, precision={"compute": compute}, parallel=parallel, activation_checkpointing=kept)


def test_a_stage_knows_its_units() -> None:
    plan = plan_of(recipe_of("gpt2"), 2, parallel={"pipeline": 2})
    with pytest.raises(ValueError, match=r"stage 1 has no unit blocks.0; it has embedding, blocks.3"):
        unit_activations(plan, plan.pipeline.stages[1][0], "blocks.0")


def test_cuda() -> None:
    """By the sources of torch's kernels: 70 channels of a head are padded to 72, and 10 queries to 32."""
    found = {}
    for compute, kv_heads in product(("fp32", "bf16"), (6, 2)):
        recipe = recipe_of("llama", hidden=420, kv_heads=kv_heads)
        plan = make_plan(parse_recipe({**recipe, "precision": {"compute": compute}}), Facts(world=1, device="cuda"))
        tensors = block_tensors(plan, Sizes.of(plan))
        found[compute, kv_heads] = {one.name: one.shape for one in tensors if "norm" not in one.name}
        assert plan.kernels.mask == 1
        assert {one.width for one in tensors if one.name.startswith("norm1's root")} == {4}
    assert found["bf16", 2]["queries, keys and values"] == (30, 10, 72)
    assert found["bf16", 2]["padded output"] == (30, 6, 72)
    # 70 is no multiple of 4.
    assert found["fp32", 6]["attention weights"] == found["fp32", 2]["attention weights"] == (3, 6, 10, 10)
    plan = make_plan(parse_recipe(recipe_of("gpt2", hidden=48)), Facts(world=1, device="cuda"))
    assert plan.kernels.attention == "flash"
    plan = make_plan(
        parse_recipe({**recipe_of("gpt2", hidden=48), "precision": {"compute": "fp32"}}), Facts(world=1, device="cuda")
    )
    normalizers = [one for one in block_tensors(plan, Sizes.of(plan)) if one.name == "normalizers"]
    assert [one.shape for one in normalizers] == [(3, 6, 32)]
    # The memory-efficient kernel shares no keys. Queries are a view of the product, which stays.
    shared = {**recipe_of("llama", hidden=48, kv_heads=2), "precision": {"compute": "fp32"}}
    plan = make_plan(parse_recipe(shared), Facts(world=1, device="cuda"))
    shapes = {one.name: one.shape for one in block_tensors(plan, Sizes.of(plan))}
    assert shapes["queries, keys and values"] == (30, 10, 8)
    assert shapes["keys and values of each query head"] == (30, 12, 8)
