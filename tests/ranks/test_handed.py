"""What steps and evaluations hand to collectives and messages, against their plan: every call, by operation, group and
bytes."""

from collections import Counter
from dataclasses import replace

import pytest
from llmtrain.plan.collective_buffers import in_one_round
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
from tests.ranks.harness import Case, Result, Trained
from tests.ranks.strategies import COVERING as SHARDED
from tests.ranks.strategies import NARROW_SUMS, WIDE_SUMS
from tests.ranks.test_breadth_first import LATER, SOON
from tests.ranks.test_grid import BY_STAGE, QUANTIZED, every, every_zero
from tests.ranks.test_grid import COVERING as GRIDS

FEW = ("train.steps=3", "optimizer.warmup=1", "train.eval_every=3", "checkpoint.every=3")
REDUCTIONS = ("all_to_all", "reduce_scatter")


def counted(case: Case) -> Case:
    """Return a short run of a case whose calls are counted."""
    return replace(case, keys=(*case.keys, *FEW), handed=True)


def cases(found: list[object]) -> list[Case]:
    """Return the cases among parameters."""
    return [one if isinstance(one, Case) else one.values[0] for one in found]  # type: ignore[attr-defined]


def plan_of(case: Case, result: Result) -> Plan:
    """Return the plan of a run."""
    facts = Facts(world=case.world, device="cpu", ranks_per_node=case.node or case.world)
    return make_plan(load_recipe(str(result.folder / "recipe.resolved.yaml")), facts)


def name_of(op: str, ranks: tuple[int, ...], size: int) -> str:
    """Return the text by which a planned call is counted."""
    return f"send {size}" if op == "send" else text("reduce" if op in REDUCTIONS else op, ranks, size)


def planned(case: Case, result: Result, rank: int, step: int) -> Handed:
    """Return the calls that a rank's plan has for a step."""
    plan = plan_of(case, result)
    found: Counter[str] = Counter()
    calls = StepCalls(plan, rank, programs_of(plan)(rank))
    every = (calls.sharding(), calls.tensor(), calls.messages(), calls.replicas(), calls.scalars(is_logged(plan, step)))
    for call in (one for group in every for one in group):
        found[name_of(call.traffic.op, call.ranks, call.traffic.size)] += call.times
    return found


def planned_evaluation(case: Case, result: Result, rank: int, parts: list[list[int]]) -> Handed:
    """Return the calls that a rank's plan has for an evaluation."""
    plan = plan_of(case, result)
    calls = evaluation_calls(plan, rank, programs_of(plan)(rank), parts)
    return Counter(name_of(op, ranks, size) for op, ranks, size in calls)


def check(case: Case, trained: Trained) -> None:
    """Compare every rank's calls with its plan, in every step and in the evaluations before and after them."""
    result = trained(case)
    # The run's own counters leave out the sums of TP-replicated gradients and of scalars.
    end = read_metrics(result.folder / "metrics.jsonl")[-1]
    assert end["planned"]["comm_bytes"] == end["measured"]["comm_bytes"]
    assert end["planned"]["memory_bytes"] > 0 < end["measured"]["memory_bytes"]
    for rank, steps in enumerate(result.notes("handed")):
        assert len(steps) == 3
        for step, found in enumerate(steps, 1):
            expected = planned(case, result, rank, step)
            assert bool(expected) == (case.world > 1)
            assert dict(found) == dict(expected)
    for rank, evaluations in enumerate(result.notes("evaluated")):
        assert len(evaluations) == 2
        for parts, found in evaluations:
            expected = planned_evaluation(case, result, rank, parts)
            assert bool(expected) == (case.world > 1)
            assert dict(found) == dict(expected)


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
FEW_CASES = [
    counted(case)
    for case in [
        *[case for case, _ in SHARDED if case.world in (4, 6) and case.accumulation == 4][::3],
        *cases(GRIDS)[3:8],
        *cases(QUANTIZED)[:3],
        *NARROW_SUMS,
        *WIDE_SUMS[2::3],
        *BY_STAGE,
        SOON[2],
    ]
]
MANY = [
    *SOON,
    *LATER,
    *WIDE_SUMS,
    *(case for case, _ in SHARDED),
    *cases(GRIDS),
    *cases(QUANTIZED),
    *list(every())[::4],
]
MANY += [case for case, _ in every_zero()][::4]
MANY = [case for case in dict.fromkeys(map(counted, MANY)) if case not in FEW_CASES]


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_calls(case: Case, trained: Trained) -> None:
    check(case, trained)


def bytes_for_others(plan: Plan, rank: int, step: int) -> Counter[str]:
    """Return the bytes that a rank's plan has for others in a step, by the ranks of the group, and of messages."""
    found: Counter[str] = Counter()
    calls = StepCalls(plan, rank, programs_of(plan)(rank))
    every = (calls.sharding(), calls.tensor(), calls.messages(), calls.replicas(), calls.scalars(is_logged(plan, step)))
    for call in (one for group in every for one in group):
        size, others, ranks = call.traffic.size, len(call.ranks) - 1, ",".join(map(str, call.ranks))
        if call.traffic.op == "send":
            found["messages"] += size * call.times
        elif call.traffic.op != "all_reduce":
            found[ranks] += size // (others + 1) * others * call.times
        elif in_one_round(size, others + 1):
            found[ranks] += size * others * call.times
        else:
            found[ranks] += 2 * size * others // (others + 1) * call.times
    return found


@pytest.mark.parametrize("case", BY_TORCH, ids=str)
def test_bytes_that_torch_is_handed(case: Case, trained: Trained) -> None:
    """Counted around torch.distributed, by group, in every step."""
    check(case, trained)
    result = trained(case)
    plan = plan_of(case, result)
    for rank, steps in enumerate(result.notes("to_torch")):
        assert len(steps) == 3
        for step, found in enumerate(steps, 1):
            assert found
            assert found == bytes_for_others(plan, rank, step)


@pytest.mark.soak
@pytest.mark.parametrize("case", MANY, ids=str)
def test_calls_of_many(case: Case, trained: Trained) -> None:
    check(case, trained)
