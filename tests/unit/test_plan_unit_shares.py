"""Which units' optimizer states stay where `offload.share` leaves a part on the device: the first ones."""

import pytest
from llmtrain.plan.facts import Facts
from llmtrain.plan.offload import GRANULE, Offload, bucket_slots
from llmtrain.plan.per_rank.rank_buckets import rank_buckets
from llmtrain.plan.per_rank.rank_units import rank_units
from llmtrain.plan.per_rank.roles import roles
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import parse_recipe

UNTIED = {"family": "llama", "layers": 8, "hidden": 64, "heads": 4, "vocab": 512}
TIED = {**UNTIED, "tie_embeddings": True}


def plan_of(model: dict[str, object], world: int, share: float, **keys: object) -> Plan:
    given = {"optimizer": "host", "share": share, "bucket": 2048}
    recipe = {
        "name": "tiny", "model": model, "data": {"path": "set", "sequence_length": 16},
        "train": {"steps": 10, "global_batch": 16, "microbatch": 1}, "offload": given, **keys,
    }  # fmt: skip
    return make_plan(parse_recipe(recipe), Facts(world=world, device="cuda", ranks_per_node=world))


def shares(plan: Plan, rank: int) -> list[float]:
    """Return the share of each unit of a rank that leaves, in the order of the model."""
    return [plan.sharding.offload.shares[unit.name] for unit in rank_units(plan, rank)]


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("model", [UNTIED, TIED], ids=["untied", "tied"])
def test_the_first_units_stay(model: dict[str, object], stage: int, share: float) -> None:
    """All of each, but for one of which a part stays."""
    plan = plan_of(model, 4, share, zero={"stage": stage})
    leave = shares(plan, 0)
    assert leave == sorted(leave)
    assert sum(0 < one < 1 for one in leave) <= 1
    placements = plan.sharding.placements
    stepped = sum(placements[unit.name].padded(unit.numel) // 4 for unit in rank_units(plan, 0))
    assert 0 <= sum(bucket.numel for bucket in rank_buckets(plan, 0)) - share * stepped < 2 * GRANULE


def test_each_stage_keeps_its_own() -> None:
    plan = plan_of(UNTIED, 2, 0.5, parallel={"pipeline": 2})
    for role in roles(plan):
        leave = shares(plan, role.rank)
        assert leave == sorted(leave)
        assert leave[0] == 0
        assert leave[-1] == 1


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_both_copies_of_a_tied_embedding_are_stepped_by_the_same_kernel(share: float) -> None:
    plan = plan_of(TIED, 2, share, parallel={"pipeline": 2})
    first, last = (
        [(one.start, one.end) for one in rank_buckets(plan, role.rank) if one.unit == "embedding"]
        for role in roles(plan)
    )
    assert first == last


def test_what_stays_needs_no_groups_of_its_own() -> None:
    assert len(set(plan_of(UNTIED, 4, 0.5, zero={"stage": 3}).sharding.placements.values())) == 1


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("stepped", [1, 1023, 1024, 10_000, 123_457])
def test_buckets_cover_the_share(share: float, stepped: int) -> None:
    offload = Offload(tier="host", share=share, bucket=4096)
    resident = offload.resident("unit", stepped)
    buckets = offload.buckets(resident, stepped)
    assert [start for start, _ in buckets] == [resident, *(end for _, end in buckets[:-1])]
    assert buckets[-1][1] == stepped
    assert all(start % GRANULE == 0 and 0 < end - start <= 4096 for start, end in buckets)
    assert 0 <= sum(end - start for start, end in buckets) - share * stepped < GRANULE
    assert bucket_slots(len(buckets)) == min(6, len(buckets))
