"""What steps and evaluations hand to collectives and messages, against their plan: every call, by operation, group and
bytes; and below them the bytes for other ranks, by purpose and group."""

from collections import Counter
from dataclasses import replace

import pytest
from llmtrain.cluster.tiers import node_ranks
from llmtrain.plan.collective_buffers import backend_of, in_one_round
from llmtrain.plan.facts import Facts
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.by_rank import programs_of
from llmtrain.plan.program.step_calls import StepCalls
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.telemetry.metrics import read_metrics
from llmtrain.telemetry.step_record import is_logged

from tests.ranks.evaluation_calls import evaluation_calls
from tests.ranks.handed import Handed, text
from tests.ranks.handed_bytes import MESSAGES
from tests.ranks.harness import Case, Result, Trained
from tests.ranks.strategies import COVERING as SHARDED
from tests.ranks.strategies import FURTHER as FURTHER_SHARDED
from tests.ranks.strategies import NARROW_SUMS, WIDE_SUMS
from tests.ranks.test_breadth_first import LATER, SOON
from tests.ranks.test_grid import BY_STAGE, FURTHER, FURTHER_QUANTIZED, QUANTIZED, every, every_zero
from tests.ranks.test_grid import COVERING as GRIDS

FEW = ("train.steps=3", "optimizer.warmup=1", "train.eval_every=3", "checkpoint.every=3")
REDUCTIONS = ("all_to_all", "reduce_scatter")


def counted(case: Case) -> Case:
    """Return a short run of a case whose calls are counted."""
    return replace(case, keys=(*case.keys, *FEW), handed=True)


def plan_of(case: Case, result: Result) -> Plan:
    """Return the plan of a run."""
    facts = Facts(world=case.world, device="cpu", ranks_per_node=case.node or case.world)
    return make_plan(load_recipe(str(result.folder / "recipe.resolved.yaml")), facts)


# Purpose, operation, ranks of the group, bytes of the whole tensor, and how often.
Planned = list[tuple[str, str, tuple[int, ...], int, int]]


def planned(plan: Plan, rank: int, step: int) -> Planned:
    """Return the calls that a rank's plan has for a step."""
    calls = StepCalls(plan, rank, programs_of(plan)(rank))
    every = (calls.sharding(), calls.tensor(), calls.messages(), calls.replicas(), calls.scalars(is_logged(plan, step)))
    return [
        (call.traffic.purpose, call.traffic.op, call.ranks, call.traffic.size, call.times)
        for group in every
        for call in group
    ]


def planned_evaluation(plan: Plan, rank: int, parts: list[list[int]]) -> Planned:
    """Return the calls that a rank's plan has for an evaluation."""
    return [(*call, 1) for call in evaluation_calls(plan, rank, programs_of(plan)(rank), parts)]


def by_text(calls: Planned) -> Handed:
    """Return planned calls as they are counted."""
    found: Handed = Counter()
    for _, op, ranks, size, times in calls:
        name = f"send {size}" if op == "send" else text("reduce" if op in REDUCTIONS else op, ranks, size)
        found[name] += times
    return found


def bytes_for_others(plan: Plan, calls: Planned) -> Handed:
    """Return the bytes that planned calls hand over for other ranks, by purpose and the ranks of the group, and of
    messages."""
    found: Handed = Counter()
    for purpose, op, ranks, size, times in calls:
        count = len(ranks)
        if op == "send":
            found[MESSAGES] += size * times
            continue
        share = size // count * (count - 1)
        if op == "all_reduce":
            shared = backend_of(plan.device, ranks, node_ranks(plan.tiers)) == "shared"
            share = size * (count - 1) if shared or in_one_round(size, count) else 2 * size * (count - 1) // count
        found[f"{purpose} {','.join(map(str, ranks))}"] += share * times
    return found


def check_calls(plan: Plan, calls: Planned, counted: Handed, nbytes: Handed) -> None:
    """Compare what a rank handed over with its planned calls."""
    assert bool(calls) == (plan.grid.world > 1)
    assert counted == by_text(calls)
    assert nbytes == bytes_for_others(plan, calls)


def check(case: Case, trained: Trained) -> None:
    """Compare every rank's calls and bytes with its plan, in every step and in the evaluations before and after
    them."""
    result = trained(case)
    # The run's own counters leave out the sums of TP-replicated gradients and of scalars.
    end = read_metrics(result.folder / "metrics.jsonl")[-1]
    assert end["planned"]["comm_bytes"] == end["measured"]["comm_bytes"]
    assert end["planned"]["memory_bytes"] > 0 < end["measured"]["memory_bytes"]
    plan = plan_of(case, result)
    for rank, (steps, nbytes) in enumerate(zip(result.notes("handed"), result.notes("handed_bytes"), strict=True)):
        assert len(steps) == 3
        for step, found in enumerate(steps, 1):
            check_calls(plan, planned(plan, rank, step), found, nbytes[step - 1])
    for rank, evaluations in enumerate(result.notes("evaluated")):
        assert len(evaluations) == 2
        for parts, found, handed in evaluations:
            check_calls(plan, planned_evaluation(plan, rank, parts), found, handed)


# Each rank is a node of its own: all that ranks exchange passes through torch.distributed.
BY_TORCH = [
    counted(Case(4, keys, node=1, accumulation=2, tensor=tensor, pipeline=pipeline))
    for keys, tensor, pipeline in (
        *(((f"zero.stage={stage}",), 1, 1) for stage in range(4)),
        (("zero.stage=3", "quantize.weights=int8", "quantize.gradients=int4"), 1, 1),
        (("zero.stage=2", "precision.compute=bf16", "precision.reduce=fp32"), 1, 1),
        (("parallel.sequence=true", "zero.stage=1"), 2, 1),
        (("zero.stage=1", "model.tie_embeddings=true"), 1, 2),
        (("pipeline.schedule=zero-bubble",), 2, 2),
    )
]
FEW_CASES = BY_TORCH + [
    counted(case)
    for case in [
        *[case for case, _ in SHARDED if case.world in (4, 6)][::5],
        *GRIDS[2:6],
        *QUANTIZED,
        *NARROW_SUMS[1::2],
        *WIDE_SUMS[2::3],
        SOON[2],
    ]
]
MANY = [
    *SOON,
    *LATER,
    *NARROW_SUMS,
    *WIDE_SUMS,
    *BY_STAGE,
    *(case for case, _ in SHARDED + FURTHER_SHARDED),
    *GRIDS,
    *FURTHER,
    *QUANTIZED,
    *FURTHER_QUANTIZED,
    *list(every())[::4],
]
MANY += [case for case, _ in every_zero()][::4]
MANY = [case for case in dict.fromkeys(map(counted, MANY)) if case not in FEW_CASES]


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_calls(case: Case, trained: Trained) -> None:
    check(case, trained)


@pytest.mark.soak
@pytest.mark.parametrize("case", MANY, ids=str)
def test_calls_of_many(case: Case, trained: Trained) -> None:
    check(case, trained)
