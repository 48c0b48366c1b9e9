"""Programs of evaluations, and sums over ranks that hold the same parameters: each fault is found, with a sentence."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from llmtrain.plan.pipeline.actions import Action, Kind
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.instructions import Gather, Pass, Reduce, ReplicaSum
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.plan.program.step_calls import StepCalls
from llmtrain.plan.validation.grid import RankPrograms, evaluation_programs, step_programs
from llmtrain.plan.validation.places import program_issues
from llmtrain.plan.validation.validate import evaluation_problems, program_problems

from tests.unit.program_faults import (
    Fault,
    adds,
    altered,
    at,
    check_sentences,
    check_step_fault,
    from_secondary,
    on,
    on_role,
    swap_passes,
    swap_reductions,
    swap_start,
    without,
)
from tests.unit.program_plans import PLANS, SUMS, small_plan

FAULTS: dict[str, tuple[str, Fault, list[str]]] = {
    "a sum of TP-replicated gradients missing on one rank": (
        "sequence", on(1, altered(Reduce, "blocks.1", partial=0)),
        [r"rank 1, pass B0, .*: before the reduction of blocks.1, tensor-parallel ranks sum 0 elements; expected 64",
         r"rank 1, .*: number \d+ of its partial collectives over 2 ranks is .* of blocks.0 .* of blocks.1",
         r"rank \d, .*: it waits forever for the all_reduce of blocks.1 .* over 2 ranks, while rank 1 runs"],
    ),
    "sums of unlike sizes": (
        "sequence", on(3, altered(Reduce, "head", partial=31)),
        [r"rank 3, .*: number 1 of its partial .* of head .* with 124 bytes, but rank 2 of its group has .* 128 bytes"],
    ),
    "sums in another order on one rank": (
        "sequence", on(2, swap_reductions),
        [r"rank 3, .*: number 2 of its partial collectives .* of blocks.3 .* rank 2 of its group has .* of blocks.2"],
    ),
    "a sum without data-parallel ranks missing": (
        "sequence alone", on(1, lambda program: replace(program, finish=program.finish[1:])),
        ["rank 1, end of the passes: sum 1 is 64 elements of blocks.1 over partial ranks; expected .* blocks.0",
         r"rank \d, end of the passes: it waits forever for the all_reduce of "],
    ),
    "the sum over a stage missing on one rank": (
        "packed", on(3, lambda program: replace(program, finish=())),
        ["rank 3, end of the passes: sum 1 is missing; expected 288 elements of all units over stage ranks",
         "rank 0, end of the passes: it waits forever for the all_reduce of all units .*, which rank 3 does not start"],
    ),
    "a tied embedding summed by the first stage alone": (
        "tied", on_role(2, lambda program: replace(program, finish=())),
        ["ranks 2, 3, end of the passes: sum 1 is missing; expected 1632 elements of embedding over tied ranks",
         "rank 0, end of the passes: it waits forever for the all_reduce of embedding .* which rank 2 does not start"],
    ),
    "parts of a tied embedding of unlike sizes": (
        "tied", on_role(2, lambda program: replace(program, finish=(replace(program.finish[0], elements=9),))),
        ["end of the passes: number 1 of its tied collectives over 2 ranks .* with 36 bytes, but rank 0 .* 6528 bytes"],
    ),
    "a sum of a rank that has no copy": (
        "stage3", on(0, lambda program: replace(program, finish=(ReplicaSum("tied", "embedding", 8),))),
        ["rank 0, end of the passes: sum 1 is 8 elements of embedding over tied ranks; expected missing"],
    ),
}  # fmt: skip

# Groups of microbatches of the evaluations that are broken.
GROUPS = (4, 4, 1)

EVALUATION_FAULTS: dict[str, tuple[str, Fault, list[str]]] = {
    "dropped gather": (
        "stage3", on_role(0, without(Gather, "blocks.2")),
        ["ranks 0, 1, 2, 3, pass F0, use blocks.2: blocks.2 is used, but it is not gathered"],
    ),
    "gather missing on one rank": (
        "stage3", on(1, without(Gather, "blocks.2")),
        [r"rank \d, .*: it waits forever for the all_gather of blocks.2 .*, while rank 1 runs the all_gather of blo"],
    ),
    "more memory than a step": (
        "stage3", on_role(0, lambda program: replace(program, weights=program.weights + 10**6)),
        [r"rank 0, the pool of gathered weights has \d+ elements, above the 86400 of a step"],
    ),
    "missing microbatch": (
        "pipeline", on_role(0, lambda program: replace(program, passes=program.passes[:-1])),
        ["ranks 0, 1, pass F8: the program lacks it", "rank 2, pass F8: it waits forever for the message of stage 0"],
    ),
    "groups in another order": (
        "pipeline", on_role(2, swap_passes(3, 4)),
        ["rank 2, pass F4: it receives the message of microbatch 3, as stage 0 sends that one first"],
    ),
    "a backward pass": (
        "stage1", on_role(0, lambda program: replace(program, passes=(
            *program.passes, Pass(Action(0, 0, Kind.B), ())))),
        ["pass B0: the schedule has no such pass"],
    ),
    "a reduction": (
        "stage3", on_role(0, at("F8 done head", adds(Reduce("head", 0, True, True)))),
        ["pass F8: it reduces head 1 times; expected 0"],
    ),
    "a sum over replicas": (
        "tied", on_role(0, lambda program: replace(program, finish=(ReplicaSum("tied", "embedding", 1632),))),
        ["end of the passes: sum 1 is 1632 elements of embedding over tied ranks; expected missing"],
    ),
    "secondary copy read before it is filled": (
        "secondary", on_role(0, from_secondary),
        ["blocks.2 is gathered from its secondary copy before that is filled"],
    ),
    "message-driven: another order on one replica": (
        "driven", on(1, swap_start),
        [r"rank 1, start: number 1 of its gather collectives"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_sums_is_found(fault: str, tmp_path: Path) -> None:
    check_step_fault(FAULTS[fault], tmp_path)


@pytest.mark.parametrize("fault", EVALUATION_FAULTS)
def test_a_fault_of_an_evaluation_is_found(fault: str, tmp_path: Path) -> None:
    name, breaks, expected = EVALUATION_FAULTS[fault]
    plan = small_plan(tmp_path, name)
    check_sentences(program_problems(plan, breaks(evaluation_programs(plan, GROUPS)), GROUPS), expected)


@pytest.mark.parametrize("name", PLANS)
def test_an_evaluation_has_no_problem(name: str, tmp_path: Path) -> None:
    plan = small_plan(tmp_path, name)
    assert evaluation_problems(plan) == []
    programs = evaluation_programs(plan, GROUPS)
    # Without ranks that are alike, every rank is followed.
    assert program_problems(plan, {rank: replace(one) for rank, one in programs.items()}, GROUPS) == []


@pytest.mark.parametrize("name", PLANS)
def test_sums_over_replicas_are_the_counted_ones(name: str, tmp_path: Path) -> None:
    """The bytes that a step's programs sum over replicas are those that the plan's traffic counts."""
    plan = small_plan(tmp_path, name)
    ranks = RankPrograms(plan, step_programs(plan))
    for rank, program in ranks.programs.items():
        part = ranks.part(rank)
        issued = [one for _, issue in program_issues(program) for one in part.partial(issue)]
        found = Counter(one.traffic.size for one in [*issued, *map(part.final, program.finish)])
        calls = StepCalls(plan, rank, Programs(ProgramSpec.of(plan, rank))).replicas()
        expected = Counter[int]()
        for call in calls:
            expected[call.traffic.size] += call.times
        assert found == expected
        groups = {one.group for one in program.finish}
        assert groups == ({SUMS[name]} - {""} if name in SUMS else set())
