"""`zero.resident: auto` fills the stated memory so that slow links carry least, and changes nothing else."""

from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest
from llmtrain.cluster.description import Accelerator, Cluster, Node, NodeGroup
from llmtrain.errors import BadInputError
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import memory_budget
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.plan.record import decisions
from llmtrain.plan.resolve.auto_resident import gather_bytes
from llmtrain.plan.resolve.check import check
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.resident_check import resident_problem
from llmtrain.recipe.load import load_recipe, parse_recipe
from llmtrain.recipe.schema import Recipe

from tests.unit.random_plans import RandomPlans, recipe_text

EQUAL = """
model: {family: llama, layers: 12, hidden: 64, heads: 4, ffn: 256, vocab: 64, tie_embeddings: false}
data: {path: d, sequence_length: 16}
train: {global_batch: 16, microbatch: 1}
zero: {stage: 3}
"""


def facts(memory: int | None, node: int, world: int, groups: int = 1) -> Facts:
    """Return ranks of a described cluster whose accelerators have `memory` bytes."""
    accelerator = Accelerator(memory=None if memory is None else f"{memory}B")
    clusters = tuple(NodeGroup(name=f"c{place}", nodes=world // node // groups) for place in range(groups))
    cluster = Cluster(accelerator=accelerator, node=Node(ranks=node), clusters=clusters if groups > 1 else ())
    return Facts(world=world, device="cpu", ranks_per_node=node, cluster=cluster)


def equal(folder: Path, *overrides: str) -> Recipe:
    """Return the recipe of a model of 12 equal blocks."""
    (folder / "equal.yaml").write_text(EQUAL)
    return load_recipe(str(folder / "equal.yaml"), overrides)


def least_and_whole(plan: Plan, given: Facts) -> tuple[int, int]:
    """Return the bytes of the fullest rank with the least memory for gathered weights, and those that all add."""
    row = memory_budget(plan).fullest
    spec = ProgramSpec.of(plan, row.role.rank)
    whole = sum(size for name, size in spec.padded.items() if spec.is_gathered(name)) * plan.compute_bytes
    return row.total, whole - row.device["gathered_weights"]


def sent(plan: Plan) -> tuple[int, ...]:
    """Return the bytes of gathers by tier, slowest first."""
    return gather_bytes(plan)


def degree(plan: Plan) -> int:
    """Return the degree of the secondary copy."""
    return plan.sharding.placements["blocks.0"].degrees.secondary


def test_without_stated_memory_two_units_are_gathered_ahead(tmp_path: Path) -> None:
    plan = make_plan(equal(tmp_path), facts(None, 2, 4))
    assert (plan.sharding.resident, degree(plan)) == (0, 0)


@pytest.mark.parametrize("keys", [["zero.stage=2"], ["parallel.pipeline=2", "pipeline.schedule=message-driven"]])
def test_where_nothing_is_left_to_choose(keys: list[str], tmp_path: Path) -> None:
    plan = make_plan(equal(tmp_path, *keys), facts(10**12, 2, 4))
    assert (plan.sharding.resident, degree(plan)) == (0, 0)


def test_the_last_byte_is_used(tmp_path: Path) -> None:
    recipe, given = equal(tmp_path, "zero.secondary=0"), facts(None, 2, 4)
    least, more = least_and_whole(make_plan(recipe, given), given)
    kept = make_plan(recipe, given)
    first = max(row.device["gathered_weights"] for row in memory_budget(kept).rows)
    for room, resident in ((-1, 0), (0, first), (5, first + 5), (more, first + more), (10**9, first + more)):
        given = facts(least + room, 2, 4)
        plan = make_plan(recipe, given)
        assert plan.sharding.resident == resident
        assert memory_budget(plan).excess == (1 if room < 0 else 0)
        check(plan, given)


def test_a_secondary_copy_is_taken_where_it_sends_less(tmp_path: Path) -> None:
    """As whole units, the room saves at most 7 of 8 gathers between nodes; with a copy in each node, one is left."""
    least, more = least_and_whole(make_plan(equal(tmp_path), facts(None, 2, 4)), facts(None, 2, 4))
    room = facts(least + more * 3 // 4, 2, 4)
    plan, whole = make_plan(equal(tmp_path), room), make_plan(equal(tmp_path, "zero.secondary=0"), room)
    assert (degree(plan), degree(whole)) == (2, 0)
    assert 0 < plan.sharding.resident < whole.sharding.resident
    assert sent(plan)[0] < 0.5 * sent(whole)[0]
    little, all_of_it = facts(least + more // 10, 2, 4), facts(least + more, 2, 4)
    assert degree(make_plan(equal(tmp_path), little)) == 0
    plan = make_plan(equal(tmp_path), all_of_it)
    assert (degree(plan), sent(plan)) == (0, sent(make_plan(equal(tmp_path), facts(10**12, 2, 4))))


def test_the_record_makes_the_same_plan_and_the_value_is_printed(tmp_path: Path) -> None:
    least, more = least_and_whole(make_plan(equal(tmp_path), facts(None, 2, 4)), facts(None, 2, 4))
    given = facts(least + more * 3 // 4, 2, 4)
    recipe = equal(tmp_path)
    plan = make_plan(recipe, given)
    assert plan.record["zero"]["resident"] == plan.sharding.resident > 0
    assert any(f"secondary=2 hierarchical=true resident={plan.sharding.resident}" in line
               for line in decisions(recipe, plan.record))  # fmt: skip
    for after in (given, facts(10**12, 2, 4)):
        again = make_plan(parse_recipe(dict(plan.record)), after)
        assert again.sharding == plan.sharding


def keys_without(keys: Iterable[str], *names: str) -> list[str]:
    return [key for key in keys if not key.startswith(names)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 4))])
def test_slow_links_carry_at_most_what_the_best_secondary_copy_of_the_same_memory_sends(
    seed: int, tmp_path: Path
) -> None:
    random, plans, compared, copies = Random(seed), RandomPlans(tmp_path, seed), 0, 0
    path = tmp_path / "auto.yaml"

    def made(keys: list[str], given: Facts) -> Plan:
        path.write_text(recipe_text(keys))
        return make_plan(load_recipe(str(path), []), given)

    while compared < 15:
        found, drawn = plans.next()
        keys = keys_without(found[:-1], "zero.secondary", "zero.resident", "quantize.secondary")
        world = drawn.grid.world
        if any(key.startswith("zero.preset") for key in keys) or not any(sent(drawn)):
            continue
        node = random.choice([ranks for ranks in (1, 2, 4, 8) if world % ranks == 0])
        groups = random.choice([1, 2]) if world % (2 * node) == 0 else 1
        unstated = facts(None, node, world, groups)
        base = made(keys, unstated)
        least, more = least_and_whole(base, unstated)
        given = facts(least + int(random.uniform(0, 1.2) * more), node, world, groups)
        try:
            plan = made(keys, given)
        except BadInputError as error:
            pytest.fail(f"{keys} {given}: {error}")
        assert resident_problem(plan) is None
        assert not memory_budget(plan).excess
        slowest = sent(plan)[0]
        assert slowest <= sent(base)[0], (keys, given)
        for number in range(1, world + 1):
            try:
                other = made([*keys, f"zero.secondary={number}", "zero.resident=0"], given)
            except BadInputError:
                continue
            if not memory_budget(other).excess:
                copies += 1
                assert slowest <= sent(other)[0], (keys, given, number)
        compared += 1
    assert copies
