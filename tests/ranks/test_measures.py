"""Reported memory and traffic against formulas, in the cases of the parity tests."""

from collections import Counter
from dataclasses import replace

import pytest
from llmtrain.cluster.layout import Axis
from llmtrain.cluster.levels import Degrees
from llmtrain.model.tensors import model_units
from llmtrain.plan.facts import Facts
from llmtrain.plan.per_rank.process_groups import group_sizes
from llmtrain.plan.per_rank.states import most_states
from llmtrain.plan.placement import UNIT_ALIGNMENT
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.instructions import Gather, Program
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.model_shape import model_shape
from llmtrain.recipe.load import load_recipe
from llmtrain.recipe.schema import Recipe

from tests.ranks.harness import BATCH, Case, Result, Trained, soak_except
from tests.ranks.strategies import COVERING, FURTHER

BLOCK, UNITS = 256, 5
FACTS = Facts(world=1, device="cpu")
SOON = [case for case, _ in COVERING]
CASES = soak_except(SOON, [case for case, _ in COVERING + FURTHER if "quantize.block=64" not in case.keys])


def facts(result: Result) -> tuple[Recipe, Degrees, list[int]]:
    """Return a run's resolved recipe, its degrees, and its units' padded elements."""
    recipe = load_recipe(str(result.folder / "recipe.resolved.yaml"))
    cut = recipe.zero.partition
    given = (recipe.parallel.data, cut.weights, cut.gradients, cut.optimizer, recipe.zero.secondary)
    # A resolved recipe leaves none of them open.
    degrees = Degrees(*(one for one in given if isinstance(one, int)))
    assert (degrees.ranks, degrees.weights, degrees.gradients, degrees.optimizer, degrees.secondary) == given
    multiple = degrees.ranks * shard_multiple(recipe)
    padded = [-(-unit.numel // multiple) * multiple for unit in model_units(model_shape(recipe, FACTS))]
    return recipe, degrees, padded


def shard_multiple(recipe: Recipe) -> int:
    """Return the number of elements that divides every shard: with quantized weights, no block spans two shards."""
    return UNIT_ALIGNMENT if widths(recipe)[0] == 32 else BLOCK


def packed(numel: int, bits: int) -> int:
    """Return the bytes of `numel` elements with an fp32 scale for each block, and without scales for 32 bits."""
    return numel * bits // 8 + (4 * -(-numel // BLOCK) if bits < 32 else 0)


def widths(recipe: Recipe) -> tuple[int, int, int]:
    """Return the bits of weights, secondary copy and gradients."""
    quantize = recipe.quantize
    return tuple(
        {"none": 32, "int8": 8, "int4": 4}[str(kind)]
        for kind in (quantize.weights, quantize.secondary, quantize.gradients)
    )  # type: ignore[return-value]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_model_states_take_what_zero_says(case: Case, trained: Trained) -> None:
    """ZeRO, section 5, in fp32: 4 bytes for weights, 4 for gradients, 8 for moments; separate masters only if they
    differ from the weights."""
    result = trained(case)
    recipe, degrees, units = facts(result)
    own = 4 if recipe.quantize.weights == "int8" and degrees.optimizer != degrees.weights else 0
    expected = sum(
        4 * padded // degrees.weights + 4 * padded // degrees.gradients + (8 + own) * padded // degrees.optimizer
        for padded in units
    )
    if degrees.secondary:
        expected += sum(packed(padded // degrees.secondary, widths(recipe)[1]) for padded in units)
    assert {held for rank in result.notes("state_bytes") for held in rank} == {expected}
    assert {row["memory_bytes"]["model_states"] for row in result.rows} == {expected}
    planned = make_plan(recipe, Facts(world=case.world, device="cpu", ranks_per_node=case.node or case.world))
    assert most_states(planned).total == expected
    padding = sum(units) - sum(unit.numel for unit in model_units(model_shape(recipe, FACTS)))
    assert 0 <= padding < UNITS * degrees.ranks * shard_multiple(recipe)


GROUPED = [
    Case(4, ("zero.stage=3", "zero.hierarchical=false"), node=2),
    Case(4, ("zero.stage=1", "parallel.sequence=true", "quantize.gradients=int4"), node=4, tensor=2),
    Case(4, ("pipeline.schedule=zero-bubble-v", "model.layers=8"), tensor=1, pipeline=4),
    Case(4, ("model.tie_embeddings=true", "pipeline.schedule=message-driven"), tensor=2, pipeline=2),
]


@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_the_groups_that_are_planned_for(case: Case, trained: Trained) -> None:
    """Each rank joins the groups whose memory the plan counts."""
    result = trained(case)
    recipe = load_recipe(str(result.folder / "recipe.resolved.yaml"))
    plan = make_plan(recipe, Facts(world=case.world, device="cpu", ranks_per_node=case.node or case.world))
    for rank, joined in enumerate(result.notes("groups")):
        assert sorted(joined) == sorted(group_sizes(plan, plan.grid.coordinate(rank, Axis.PIPELINE)))


FEW = ("train.steps=6", "train.eval_every=3")
COUNTED = [
    Case(4, (keys, *FEW), node=2, accumulation=4, counted=True)
    for keys in ("zero.stage=3", "zero.preset=zero++", "zero.preset=mics", "zero.preset=topo")
]


@pytest.mark.parametrize("case", COUNTED, ids=str)
def test_no_buffer_comes_into_being_in_a_step(case: Case, trained: Trained) -> None:
    """Streams, which run all transport, allocate nothing but the test's own tensor, which shows that the count works.
    The computation allocates nothing as large as a unit."""
    result = trained(case)
    for on_streams, full in zip(result.notes("on_streams"), result.notes("full"), strict=True):
        assert len(on_streams) == 6
        assert set(on_streams) == {1}
        assert set(full) == {0}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_traffic(case: Case, trained: Trained) -> None:
    """Gathers and reductions of each microbatch and of each step.

    The program says how often each unit is gathered. That is at most as often as with the last two units of a pass
    still gathered when its backward pass begins, and the first block when the next microbatch begins.
    """
    result = trained(case)
    recipe, degrees, units = facts(result)
    weights, second, gradients = widths(recipe)
    programs = Programs(ProgramSpec.of(make_plan(recipe, replace(FACTS, world=case.world)), 0))
    gathered = Counter((one.unit, one.secondary) for one in gathers(programs.step))
    names = list(programs.spec.padded)
    forward, backward = [case.accumulation] * UNITS, [0, *[case.accumulation] * (UNITS - 1)]
    if second == 32 or not degrees.secondary:
        forward[1], backward[3:] = 1, [0, 0]
    expected = 0
    for name, padded, ahead, back in zip(names, units, forward, backward, strict=True):
        # Each further hop packs the numbers again, with a scale more for each partial block.
        expected += case.accumulation * received(padded, 1, degrees.gradients, gradients)
        expected += received(padded, degrees.gradients, degrees.optimizer, gradients)
        expected += received(padded, degrees.optimizer, degrees.ranks, gradients)
        expected += received(padded, degrees.optimizer, degrees.ranks, 32)
        expected += received(padded, degrees.weights, degrees.optimizer, weights)
        expected += gathered[name, False] * received(padded, 1, degrees.weights, weights)
        expected += gathered[name, True] * received(padded, 1, degrees.secondary or 1, second)
        assert sum(gathered[name, source] for source in (False, True)) <= ahead + back
        # Only the first of a step is from the primary copy, unless the secondary one is further away.
        if degrees.secondary and degrees.weights > 1:
            assert gathered[name, False] == 1 or degrees.secondary > degrees.weights
    for row in result.rows[2:]:
        total = sum(row["comm_sent_bytes"].values())
        slack = 4 * UNITS * 8 * degrees.ranks * case.accumulation if gradients < 32 else 0
        assert abs(total - expected) <= slack
        if {weights, gradients} == {32} and second == 32:
            assert row["comm_quantized_share"] == 0.0
    assert BATCH % case.world == 0


def gathers(program: Program) -> list[Gather]:
    """Return the gathers of a program."""
    issues = [*program.start, *(issue for one in program.passes for point in one.points for issue in point.issues)]
    return [issue for issue in issues if isinstance(issue, Gather)]


def received(padded: int, inner: int, outer: int, bits: int) -> int:
    """Return the bytes to gather a state from `outer` shards to `inner` shards, or to reduce in the other direction."""
    return (outer // inner - 1) * packed(padded // outer, bits)


def test_topo_sends_no_weights_between_nodes_but_the_update(trained: Trained) -> None:
    """ZeRO-topo, tables VII and VIII: gathers and the first hop stay inside a node; the second hop and the update
    cross."""
    result = trained(Case(4, ("zero.preset=topo",), node=2, accumulation=2))
    _, degrees, units = facts(result)
    assert degrees == Degrees(4, 2, 2, 4, 2)
    crossing = sum(packed(padded // 4, 4) + packed(padded // 4, 8) for padded in units)
    for row in result.rows:
        assert row["comm_sent_bytes"]["all"] == crossing
        assert row["comm_quantized_share"] == 1.0


def test_mics_sends_no_weights_between_nodes(trained: Trained) -> None:
    """Each gradient shard is reduced and gathered once a step over the two nodes that hold it; nothing else crosses."""
    result = trained(Case(4, ("zero.preset=mics",), node=2, accumulation=2))
    _, degrees, units = facts(result)
    assert degrees == Degrees(4, 2, 2, 2)
    assert {row["comm_sent_bytes"]["all"] for row in result.rows} == {2 * 4 * sum(units) // 4}


def test_tensor_parallel_sums_stay_in_a_node(trained: Trained) -> None:
    """Two nodes of one tensor-parallel group each: gradients alone cross between them."""
    result = trained(Case(4, ("zero.stage=0",), node=2, tensor=2))
    for row in result.rows:
        tensor, replicas = row["comm_bytes"]["tensor"], row["comm_bytes"]["replicas"]
        # Of two ranks, each sends the size of what is summed, and half of what is exchanged or gathered.
        node = tensor["all_reduce"] + tensor["all_gather"] // 2
        assert row["comm_sent_bytes"] == {"node": node, "all": sum(replicas.values()) // 2}


def test_states_of_a_stage_stay_in_a_node(trained: Trained) -> None:
    """Two nodes of one pipeline stage each: messages alone cross between them."""
    result = trained(Case(4, ("zero.stage=1",), node=2, pipeline=2))
    for row in result.rows[1:]:
        gradients, updates = row["comm_bytes"]["gradients"], row["comm_bytes"]["update"]
        # Of two ranks, each sends half of what is exchanged or gathered.
        node = (gradients["all_to_all"] + updates["all_gather"]) // 2
        assert row["comm_sent_bytes"] == {"node": node, "all": row["comm_bytes"]["pipeline"]["send"]}
