"""Programs are valid for any plan, and each fault in a program is found, with a sentence about it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from llmtrain.plan.facts import Facts
from llmtrain.plan.pipeline.actions import Action, Kind
from llmtrain.plan.program.instructions import At, Drop, Gather, Pass, Point, Reduce
from llmtrain.plan.program.transfers import unit_traffic
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.prepare import named_facts
from llmtrain.plan.validation.grid import RankPrograms, step_programs
from llmtrain.plan.validation.lanes import LaneJob, Lanes
from llmtrain.plan.validation.validate import evaluation_problems, program_problems, step_problems
from llmtrain.recipe.load import load_recipe
from llmtrain.yaml.shipped import shipped_folder, shipped_names

from tests.unit.program_faults import (
    Fault,
    adds,
    altered,
    at,
    both,
    check_step_fault,
    from_secondary,
    in_pass,
    on,
    on_role,
    ordered,
    removals,
    summed_at,
    swap_passes,
    swap_points,
    swap_reductions,
    swap_start,
    with_flags,
    without,
)  # fmt: skip
from tests.unit.program_plans import PLANS, small_plan
from tests.unit.random_plans import SCHEDULES, RandomPlans

FAULTS: dict[str, tuple[str, Fault, list[str]]] = {
    "dropped gather": (
        "stage3", on_role(0, without(Gather, "blocks.2")),
        ["ranks 0, 1, 2, 3, pass F0, use blocks.2: blocks.2 is used, but it is not gathered"],
    ),
    "gather missing on one rank": (
        "stage3", on(1, without(Gather, "blocks.2")),
        [r"rank 1, pass F0, use blocks.2: blocks.2 is used, but it is not gathered",
         r"rank 1, pass F0, done blocks.0: number 4 of its gather collectives .* all_gather of blocks.3 .* blocks.2",
         r"rank \d, .*: it waits forever for the all_gather of blocks.2 .*, while rank 1 runs the all_gather of blo"],
    ),
    "doubled gather": (
        "stage3", on_role(0, at("F0 use blocks.0", adds(Gather("blocks.0", 0)))),
        ["pass F0, use blocks.0: blocks.0 is gathered already, since start"],
    ),
    "swapped gathers on one rank": (
        "stage3", on(1, swap_start),
        [r"rank 1, start: number 1 of its gather collectives over 2 ranks is the all_gather of blocks.0 .*rank 0 .*"
         r"the all_gather of embedding",
         r"rank 1, pass F0, use embedding: it waits forever for the all_gather of .*, while rank 3 runs"],
    ),
    "gather of a unit that the rank does not hold": (
        "pipeline", on(0, at("F0 use blocks.0", adds(Gather("head", 0)))),
        ["rank 0, pass F0, use blocks.0: the rank does not hold head"],
    ),
    "gather of weights that are not sharded": (
        "stage1", on(0, at("B3 gradients blocks.0", adds(Gather("blocks.0", 0)))),
        ["rank 0, pass B3, gradients blocks.0: the rank holds all weights of blocks.0"],
    ),
    "wrong offset": (
        "stage3", on_role(0, altered(Gather, "blocks.2", offset=1)),
        [r"pass F0, done embedding: the buffer of blocks.2 takes elements 1 to 28801, which overlap that of blocks.\d"],
    ),
    "offset behind the buffer pool": (
        "stage3", on_role(0, altered(Gather, "head", offset=86400)),
        ["pass F0, done blocks.1: the buffer of head takes elements 86400 to .*, outside of the pool of 86400 el"],
    ),
    "buffer pool too small": (
        "stage3", on_role(0, lambda program: replace(program, weights=program.weights - 1)),
        [r"the buffer of blocks.\d takes .* outside of the pool of 86399 elements"],
    ),
    "budget exceeded": (
        "resident", on_role(0, lambda program: replace(program, weights=50001)),
        ["ranks 0, 1, 2, 3, the pool of gathered weights has 50001 elements, above the budget of 50000"],
    ),
    "early drop": (
        "stage3", on_role(0, at("B0 gradients blocks.3", adds(Drop("blocks.3")))),
        ["pass B0, gradients blocks.3: blocks.3 is dropped while it is in use",
         "pass B0, done blocks.3: blocks.3 is dropped, but it is not gathered"],
    ),
    "missing drop": (
        "resident", on_role(0, at("B3 done blocks.0", lambda issues: ())),
        ["pass .*: blocks.0 is gathered here, and still gathered at the end of the program"],
    ),
    "a use that does not end": (
        "stage3", on_role(0, in_pass("B3", lambda one: one._replace(points=tuple(
            point for point in one.points if str(point) != "done blocks.0")))),
        ["pass B3: point 15 is gradients embedding; expected done blocks.0", "blocks.0 is still in use at the end"],
    ),
    "missing reduction": (
        "stage3", on_role(0, at("B1 gradients blocks.1", lambda issues: ())),
        ["pass B1: it reduces blocks.1 0 times; expected 1"],
    ),
    "doubled reduction": (
        "stage3", on_role(0, at("B1 gradients blocks.1", lambda issues: issues * 2)),
        ["pass B1: it reduces blocks.1 2 times; expected 1"],
    ),
    "missing reduction of the last pass": (
        "stage1", on(2, at("B3 gradients blocks.1", lambda issues: ())),
        ["rank 2, pass B3: it reduces blocks.1 0 times; expected 1",
         r"rank 2, .*: number \d+ of its reduce collectives .* is the all_to_all of blocks.0 .*, but rank 0"],
    ),
    "reduction of an unfinished sum": (
        "stage1", on_role(0, at("B3 gradients head", adds(Reduce("blocks.1", None, False, True)))),
        ["pass B3, gradients head: it reduces blocks.1 here; expected at its gradients"],
    ),
    "reduction at the start": (
        "stage3", on_role(0, lambda program: replace(program, start=(*program.start, Reduce("head", 0, True, False)))),
        ["start: it reduces head before its first backward pass"],
    ),
    "swapped reductions on one rank": (
        "stage3", on(2, swap_reductions),
        ["rank 2, pass B0, gradients blocks.3: it reduces blocks.2 here; expected at its gradients",
         r"rank 2, pass B0, gradients blocks.3: number 2 of its reduce collectives .* blocks.2 .* blocks.3",
         r"waits forever for the all_to_all of blocks"],
    ),
    "wrong last flag": (
        "stage3", on_role(0, at("B2 gradients head", lambda issues: (replace(issues[0], last=True),))),  # type: ignore
        ["pass B2, gradients head: the reduction of head has last True; expected False"],
    ),
    "wrong first flag": (
        "stage3", on_role(0, at("B0 gradients head", lambda issues: (replace(issues[0], first=False),))),  # type: ignore
        ["pass B0, gradients head: the reduction of head has first False; expected True"],
    ),
    "a backward pass that overwrites the sum": (
        "split", on_role(0, in_pass("W1", lambda one: with_flags(one, first=True))),
        ["pass W1: the backward pass through embedding has first True; expected False"],
    ),
    "a backward pass through all of a tied embedding": (
        "split", on_role(2, in_pass("W1", lambda one: with_flags(one, leading=False))),
        ["pass W1: the backward pass through embedding has leading False; expected True"],
    ),
    "a unit without its backward pass": (
        "stage3", on_role(0, in_pass("B1", lambda one: one._replace(backward=one.backward[1:]))),
        ["pass B1: it has 0 backward passes through embedding; expected 1"],
    ),
    "secondary copy read before it is filled": (
        "secondary", on_role(0, from_secondary),
        ["pass F0, done embedding: blocks.2 is gathered from its secondary copy before that is filled"],
    ),
    "secondary copy filled twice": (
        "secondary", on_role(0, altered(Gather, "blocks.2", secondary=False, fills=True)),
        ["pass F1, done embedding: the secondary copy of blocks.2 is filled a second time"],
    ),
    "secondary copy filled from itself": (
        "secondary", on_role(0, altered(Gather, "blocks.2", secondary=True, fills=True)),
        ["a gather of blocks.2 from its secondary copy fills the secondary copy"],
    ),
    "a secondary copy that does not exist": (
        "stage3", on_role(0, altered(Gather, "blocks.2", secondary=True)), ["blocks.2 has no secondary copy"],
    ),
    "one rank reads its secondary copy, the others the shards": (
        "secondary", on(3, altered(Gather, "blocks.1", secondary=False)),
        [r"rank 3, pass B0, done head: number \d+ of its gather collectives .* of blocks.1 for weights .* rank [12] "],
    ),
    "unrounded weights in a backward pass": (
        "rounded", on_role(0, altered(Gather, "blocks.1", secondary=False, fills=False)),
        ["pass B0, use blocks.1: blocks.1 is used as gathered from the weight shards .* needs those of the secondary"],
    ),
    "swapped passes": (
        "pipeline", on_role(0, swap_passes(0, 1)),
        ["ranks 0, 1, pass F1: it is number 1 of the program, but the schedule has F0 there",
         "rank 2, pass F0: it receives the message of microbatch 1, as stage 0 sends that one first"],
    ),
    "missing pass": (
        "pipeline", on_role(2, lambda program: replace(program, passes=program.passes[:-1])),
        ["ranks 2, 3, pass B3: the program lacks it", "rank 0, pass B3: it waits forever for the message of stage 1"],
    ),
    "doubled pass": (
        "stage3", on_role(0, lambda program: replace(program, passes=(*program.passes, program.passes[-1]))),
        ["pass B3: the program has it 2 times; expected 1"],
    ),
    "foreign pass": (
        "stage3", on_role(0, lambda program: replace(program, passes=(
            *program.passes, Pass(Action(7, 0, Kind.F), ())))),
        ["pass F7: the schedule has no such pass"],
    ),
    "swapped points": (
        "stage3", on_role(0, in_pass("F2", swap_points)),
        ["pass F2: point 1 is done embedding; expected use embedding",
         "pass F2, done embedding: embedding is not in use"],
    ),
    "a point that the pass does not reach": (
        "stage3", on_role(0, in_pass("F2", lambda one: one._replace(points=(*one.points, Point(At.USE, "head"))))),
        ["pass F2: point 13 is use head; expected missing"],
    ),
    "buffer pool of gradients too small": (
        "stage3", on_role(0, lambda program: replace(program, gradients=program.gradients - 1)),
        ["pass B0, gradients blocks.3: the gradients of blocks.3 take .* outside of their pool of 57599 elements"],
    ),
    "gradients over those before": (
        "stage3", on_role(0, altered(Reduce, "blocks.2", offset=1)),
        ["pass B0, gradients blocks.2: .* overlap those of blocks.3 .*the reduction right before"],
    ),
    "gradients of a run in two buffers": (
        "breadth", on_role(0, summed_at("blocks.3", 0, "B2.1")),
        ["pass B2.1: the gradients of blocks.3 are not added to those of its pass before"],
    ),
    "gradients of a run over those of another unit": (
        "breadth", on_role(0, summed_at("blocks.3", 0, "B0.1", "B1.1", "B2.1", "B3.1")),
        ["pass B0.1: the gradients of blocks.3 take elements 0 to 28800, which overlap those of head"],
    ),
    "gradients of a run over those of the run before": (
        "breadth", on_role(0, summed_at("blocks.1", 32128, "B0", "B1", "B2", "B3")),
        ["pass B0: the gradients of blocks.1 take elements 32128 to 60928, which overlap those of blocks.2"],
    ),
    "reduction of another buffer": (
        "breadth", on_role(0, altered(Reduce, "blocks.3", offset=1)),
        ["pass B3.1: the reduction of blocks.3 is not of the buffer that has its gradients"],
    ),
    "reduction in the middle of a run": (
        "breadth", on_role(0, in_pass("B1.1", lambda one: one._replace(points=(
            *one.points, Point(At.GRADIENTS, "head", (Reduce("head", 0, True, False),)))))),
        ["pass B1.1: it reduces head 1 times; expected 0"],
    ),
    "a pass that overwrites the sum of its run": (
        "breadth", on_role(0, in_pass("B2.1", lambda one: with_flags(one, begins_run=True))),
        ["pass B2.1: the backward pass through blocks.2 has begins_run True; expected False"],
    ),
    "no buffer for sharded gradients": (
        "stage3", on_role(0, altered(Reduce, "blocks.2", offset=None)),
        ["pass B0, gradients blocks.2: the reduction of blocks.2 has no buffer, but its gradients are sharded"],
    ),
    "a buffer for gradients that are whole": (
        "stage1", on_role(0, altered(Reduce, "blocks.2", offset=0)),
        ["pass B3, gradients blocks.2: the reduction of blocks.2 has a buffer, but its gradients are not sharded"],
    ),
    "passes that wait for each other": (
        "pipeline", both(on_role(0, ordered("F0", "B0", "F1")), on_role(2, ordered("F0", "F1", "B0"))),
        ["rank 0, pass B0: it waits forever for the message of stage 1",
         "rank 2, pass F1: it waits forever for the message of stage 0"],
    ),
    "a backward pass before its forward pass": (
        "stage3", on_role(0, swap_passes(0, 1)), ["rank 0, pass B0: it runs before pass F0"],
    ),
    "tensor-parallel ranks in unlike passes": (
        "tensor", both(on(1, swap_passes(0, 2)), on(3, swap_passes(0, 2))),
        ["rank 0, pass F0: it waits forever for tensor-parallel rank 1, which is not there"],
    ),
    "message-driven: a late gather": (
        "driven", on_role(0, at("F2 done embedding", adds(Gather("embedding", 0)))),
        ["pass F2, done embedding: it gathers embedding after the first forward pass"],
    ),
    "message-driven: a reduction in a forward pass": (
        "driven", on_role(0, at("F2 done embedding", adds(Reduce("embedding", 0, False, False)))),
        ["pass F2, done embedding: it reduces embedding in a forward pass"],
    ),
    "message-driven: a drop that some orders do not allow": (
        "driven", on_role(0, at("B1 done blocks.0", adds(Drop("blocks.0")))),
        ["pass B1, done blocks.0: it drops blocks.0, but messages may let pass F2 use blocks.0 later"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_what_the_planner_makes_has_no_problem(name: str, tmp_path: Path) -> None:
    plan = small_plan(tmp_path, name)
    programs = step_programs(plan)
    assert program_problems(plan, programs) == []
    # Without ranks that are alike, every rank is followed.
    assert program_problems(plan, {rank: replace(program) for rank, program in programs.items()}) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    check_step_fault(FAULTS[fault], tmp_path)


@pytest.mark.parametrize("name", PLANS)
def test_every_instruction_is_needed(name: str, tmp_path: Path) -> None:
    """Whichever instruction the last rank lacks, that is found."""
    plan = small_plan(tmp_path, name)
    programs = step_programs(plan)
    rank = plan.grid.world - 1
    broken = list(removals(programs[rank]))
    assert len(broken) >= 5
    assert all(program_problems(plan, {**programs, rank: program}) for program in broken)


def test_a_schedule_that_never_ends_is_found(tmp_path: Path) -> None:
    """Each rank has the passes of its schedule, so that only the ranks together show the fault."""
    plan = small_plan(tmp_path, "pipeline")
    orders = []
    for actions, first in zip(plan.pipeline.schedule.actions, (("F0", "B0", "F1"), ("F0", "F1", "B0")), strict=True):
        by_name = {str(action): action for action in actions}
        orders.append((*(by_name.pop(name) for name in first), *by_name.values()))
    schedule = replace(plan.pipeline.schedule, actions=tuple(orders))
    assert step_problems(replace(plan, pipeline=replace(plan.pipeline, schedule=schedule))) == [
        "rank 0, pass B0: it waits forever for the message of stage 1",
        "rank 2, pass F1: it waits forever for the message of stage 0",
    ]


def test_lanes_that_wait_for_each_other_are_stuck(tmp_path: Path) -> None:
    """Each lane has one order on both ranks, but what one rank does first, the other one does last."""
    plan = small_plan(tmp_path, "pipeline")
    blocks = unit_traffic(plan, 0)[1]
    gather, reduction = (next(blocks.of(one)) for one in (Gather("blocks.0", 0), Reduce("blocks.0", 0, True, False)))
    lanes, jobs = Lanes(), list[LaneJob]()
    for rank, (first, second) in enumerate([(gather, reduction), (reduction, gather)]):
        before = LaneJob(rank=rank, lane=first.lane, members=(0, 1), unit="blocks.0", transfer=first, after=())
        jobs += [
            before,
            LaneJob(rank=rank, lane=second.lane, members=(0, 1), unit="blocks.0", transfer=second, after=(before,)),
        ]
        for job in jobs[-2:]:
            lanes.start(job)
    assert not any(job.done for job in jobs)
    assert lanes.awaits(jobs[1]) == (
        "the all_gather of blocks.0 for weights over 2 ranks, which rank 1 runs after the all_to_all of blocks.0 for "
        "gradients over 2 ranks"
    )


def test_collectives_of_updates_are_compared(tmp_path: Path) -> None:
    plan = small_plan(tmp_path, "stage1")
    part = RankPrograms(plan, step_programs(plan)).part(0)
    lanes = part.lanes(step_programs(plan)[0])
    updated = [one.unit for lane, found in lanes.items() for one, _ in found if one.traffic.purpose == "update"]
    assert sorted(updated) == sorted(2 * ["embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"])


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_recipes_are_valid(name: str) -> None:
    """On the hardware that their comments state."""
    needs = re.search(r"Made for (\d+) (GPU|CPU)", (shipped_folder() / f"{name}.yaml").read_text())
    assert needs
    overrides = ["data.path=corpus", "data.tokenizer=null", *(["model.vocab=2048"] if name == "quickstart" else [])]
    ranks, device = int(needs[1]), "cuda" if needs[2] == "GPU" else "cpu"
    recipe = load_recipe(name, overrides)
    facts = named_facts(recipe, Facts(world=ranks, device=device, ranks_per_node=min(ranks, 8)))  # type: ignore[arg-type]
    plan = make_plan(recipe, facts)
    assert step_problems(plan) == []
    assert evaluation_problems(plan) == []


def check_random(folder: Path, seed: int, count: int) -> None:
    plans, schedules, shapes = RandomPlans(folder, seed), set[str](), set[tuple[bool, ...]]()
    computes, rests = set[str](), set[tuple[int, str]]()
    for number in range(count):
        keys, plan = plans.next()
        programs = step_programs(plan)
        if number % 8 == 0:
            # Follow all ranks, also those that are alike.
            programs = {rank: replace(program) for rank, program in programs.items()}
        assert program_problems(plan, programs) == [], keys
        assert evaluation_problems(plan) == [], keys
        degrees = next(iter(plan.sharding.placements.values())).degrees
        schedules.add(plan.pipeline.name)
        computes.add(plan.compute)
        offload = plan.sharding.offload
        rests.update(enumerate((offload.tier, offload.parameters, offload.gradients, plan.activation_offload.tier)))
        shapes.add((degrees.weights > 1, degrees.gradients > 1, degrees.optimizer > 1, degrees.secondary > 0))
    assert schedules == set(SCHEDULES)
    assert computes == {"fp32", "bf16", "fp16"}
    assert len(rests) == 12, "four kinds of data, and each of them on the device, on the host and in files"
    assert len(shapes) == 5, "ZeRO 0 to 3, and 3 with a secondary copy"
    assert plans.refused < count


def test_random_plans_are_valid(tmp_path: Path) -> None:
    check_random(tmp_path, 0, 120)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_random_plans_are_valid(tmp_path: Path) -> None:
    check_random(tmp_path, 1, 10_000)
