"""What microbatch and recomputation become in a stated memory: the largest that fits, and no recomputation without
need."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from llmtrain.cluster.load import given_cluster
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import memory_budget, surely_exceeds
from llmtrain.plan.per_rank.states import STATES_SHARE
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.auto_batch import microbatches
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.yaml.dump import to_yaml

RECIPE = """
model: {family: llama, layers: 16, hidden: 512, heads: 8, vocab: 32000}
data: {path: set, sequence_length: 1024}
train: {global_batch: 768}
activation_checkpointing: auto
"""
AUTO, SIXTEEN = "train.microbatch=auto", "train.microbatch=16"
Planned = Callable[..., Plan]


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    """Plan the recipe with keys on a number of ranks of a described memory."""

    def plan(memory: str | None, *keys: str, world: int = 8, device: str = "cuda") -> Plan:
        (tmp_path / "tiny.yaml").write_text(RECIPE)
        stated = [] if memory is None else [f"cluster={{accelerator: {{memory: {memory}}}, node: {{ranks: 8}}}}"]
        recipe = load_recipe(str(tmp_path / "tiny.yaml"), [*stated, *keys])
        return make_plan(recipe, Facts(world=world, device=device, cluster=given_cluster(recipe.cluster)))  # type: ignore[arg-type]

    return plan


def excess(plan: Plan, microbatch: int, recompute: int) -> int:
    (layout,) = plan.stages_of(0)
    pipeline = replace(plan.pipeline, stages=((replace(layout, recompute=recompute),),))
    changed = replace(plan, batch=replace(plan.batch, microbatch=microbatch), pipeline=pipeline)
    return memory_budget(changed).excess


@pytest.mark.parametrize("share", [1, 2, 7, 12, 96, 97, 100])
@pytest.mark.parametrize(("stages", "most"), [(1, 8), (1, 1000), (4, 1000), (4, 8)])
def test_microbatches(share: int, stages: int, most: int) -> None:
    least = 1 if stages == 1 else 4 * stages
    expected = [size for size in range(1, most + 1) if share % size == 0 and share // size >= least]
    assert microbatches(share, stages, most) == (expected or [1])


@pytest.mark.parametrize("keys", [(), ("zero.stage=3",), ("zero.stage=1", "activation_checkpointing=full")], ids=str)
@pytest.mark.parametrize("memory", ["12GB", "16GB", "24GB", "80GB"])
def test_the_largest_that_fits(memory: str, keys: tuple[str, ...], planned: Planned) -> None:
    made = planned(memory, *keys)
    size = made.batch.microbatch
    assert memory_budget(made).excess == 0
    larger = [other for other in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96) if other > size]
    # All that is left can be less for stage 3, whose gathered weights fill it.
    least = planned(memory, *keys, f"train.microbatch={size}", "zero.resident=0")
    assert not larger or excess(least, larger[0], *made.pipeline.recompute)
    # Without recomputation, which is none of the recipe's choice in the last case, not even one sequence fits.
    assert not made.recomputes or "activation_checkpointing=full" in keys or excess(least, 1, 0)


def test_recomputation_comes_last(planned: Planned) -> None:
    """Every block on its own is recomputed in less time than groups, and here it takes less memory."""
    ways = {f"{tenth / 10}GB": planned(f"{tenth / 10}GB", SIXTEEN).pipeline.recompute for tenth in range(40, 320, 4)}
    found = list(dict.fromkeys(reversed(ways.values())))
    assert found == [(0,), (1,)]
    for memory, (group,) in ways.items():
        made = planned(memory, SIXTEEN)
        # Where nothing fits, the least is taken.
        fits = not memory_budget(made).excess
        assert fits or group == 1
        assert group == 0 or excess(made, 16, 0)


def test_groups_are_recomputed_where_they_alone_fit(planned: Planned) -> None:
    """Beside the loss of a large vocabulary, the inputs of all blocks take more than those of groups."""
    keys = ("model.layers=64", "model.vocab=256000", "train.microbatch=1")
    budget = memory_budget(planned("80GB", *keys, "activation_checkpointing={every: 8}"))
    made = planned(f"{budget.fullest.total}B", *keys)
    assert (made.pipeline.recompute, memory_budget(made).excess) == ((8,), 0)
    assert excess(made, 1, 1)


def test_what_no_choice_changes_of_the_host_s_memory_changes_no_choice(planned: Planned) -> None:
    """The host has no room for the copies of a checkpoint."""
    ample, scarce = (planned("12GB", "zero.stage=3", f"cluster.node.host.memory={host}") for host in ("1TB", "14GB"))
    assert memory_budget(scarce).host_excess
    assert not memory_budget(ample).exceeds
    assert (scarce.batch, scarce.pipeline.recompute) == (ample.batch, ample.pipeline.recompute)
    assert ample.batch.microbatch > 1


def test_a_record_makes_the_same_plan(planned: Planned, tmp_path: Path) -> None:
    for memory in ("10GB", "24GB"):
        made = planned(memory)
        (tmp_path / "again.yaml").write_text(to_yaml(made.record))
        recipe = load_recipe(str(tmp_path / "again.yaml"), [])
        assert make_plan(recipe, Facts(world=8, device="cuda", cluster=given_cluster(recipe.cluster))) == made


def test_what_it_is_without_a_stated_memory(planned: Planned) -> None:
    made = planned(None)
    assert (made.batch.microbatch, made.pipeline.recompute) == (8, (4,))


def test_a_cpu_has_at_most_eight(planned: Planned) -> None:
    large, small = planned("400GB", device="cpu"), planned("6GB", device="cpu")
    assert (large.batch.microbatch, large.recomputes) == (8, False)
    assert small.batch.microbatch < 8


def test_stages_have_four(planned: Planned) -> None:
    assert planned("400GB", "parallel.pipeline=4").batch.microbatches == 16


def test_offloaded_activations_are_recomputed(planned: Planned) -> None:
    assert planned("80GB", "offload.activations=host").pipeline.recompute == (4,)


def test_a_host_with_room_for_the_states_that_must_leave(planned: Planned) -> None:
    """Room on the host for all optimizer states is not needed where the device keeps some of them."""
    keys = ("cluster.node.ranks=1", "offload.optimizer=host", "offload.spare=0", "checkpoint.async=false")
    ample = planned("3GB", *keys, world=1)
    assert 0 < ample.sharding.offload.share < 1
    scarce = planned("3GB", *keys, f"cluster.node.host.memory={memory_budget(ample).host}B", world=1)
    for made in (ample, scarce):
        assert not memory_budget(made).exceeds
    assert (scarce.batch.microbatch, scarce.recomputes) == (ample.batch.microbatch, ample.recomputes)


@pytest.mark.parametrize("keys", [("zero.preset=mics",), ("zero.partition={weights: auto}",)], ids=str)
def test_parts_are_as_small_as_the_run_fits(keys: tuple[str, ...], planned: Planned) -> None:
    """The model states fit at a smaller number of ranks, and leave no room there for what a step needs besides."""
    lean = ("train.microbatch=1", "activation_checkpointing=full")
    totals = {
        ranks: memory_budget(
            planned("80GB", *keys, *lean, f"zero.partition.weights={ranks}", "zero.resident=0")
        ).fullest
        for ranks in (2, 4)
    }
    made = planned(f"{totals[4].total}B", *keys, AUTO)
    assert made.sharding.placements["embedding"].degrees.weights == 4
    assert not memory_budget(made).exceeds
    assert totals[2].total > totals[4].total > totals[2].model_states / STATES_SHARE


@pytest.mark.parametrize("host", [2, 3, 4, 5])
def test_what_surely_exceeds_the_host_never_fits(host: int, planned: Planned) -> None:
    keys = ("model.layers=64", "offload.optimizer=host", "offload.spare=0", "train.microbatch=1", "zero.resident=0")
    stated = (*keys, "activation_checkpointing=full", f"cluster.node.host.memory={host}GB", "cluster.node.ranks=1")
    whole = planned("4GB", *stated, "offload.share=1", world=1)
    parts = [planned("4GB", *stated, f"offload.share={share / 8}", world=1) for share in range(9)]
    assert not surely_exceeds(whole) or all(memory_budget(part).exceeds for part in parts)
    assert surely_exceeds(whole) == (host < 4)
