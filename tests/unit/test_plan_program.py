"""The program of a step: what is gathered, kept, dropped and reduced, and in which memory."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llmtrain.cluster.description import Accelerator, Cluster, Node
from llmtrain.cluster.levels import Degrees
from llmtrain.plan.facts import Facts
from llmtrain.plan.pipeline.actions import Action, Kind
from llmtrain.plan.pipeline.schedules import make_schedule, one_forward_one_backward
from llmtrain.plan.pipeline.stage_layout import StageLayout
from llmtrain.plan.program.buffer_pool import BufferPool, paired_offsets, paired_size
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.instructions import At, Drop, Gather, Issue, Program, Reduce
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.plan.program.text import program_lines
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.resident_check import least_resident, resident_problem
from llmtrain.recipe.load import load_recipe
from llmtrain.recipe.pipeline import ScheduleName
from llmtrain.recipe.schema import Recipe

BLOCK, EMBEDDING, HEAD = 1024, 640, 704
STAGE3 = Degrees(4, 4, 4, 4)


def spec_of(
    layers: int, microbatches: int, degrees: Degrees = STAGE3, tied: bool = False, recompute: int = 0
) -> ProgramSpec:
    """Return a whole model on one rank of a pipeline."""
    stage = StageLayout(stage=0, first=0, end=layers, opens=True, closes=True, tied=tied, recompute=recompute)
    padded = {"embedding": EMBEDDING, **{f"blocks.{index}": BLOCK for index in range(layers)}, "head": HEAD}
    return ProgramSpec(
        stages=(stage,),
        actions=one_forward_one_backward(1, microbatches).actions[0],
        padded=padded,
        degrees=dict.fromkeys(padded, degrees),
    )


def issues(program: Program) -> list[Issue]:
    return [*program.start, *(issue for one in program.passes for point in one.points for issue in point.issues)]


def gathers(program: Program) -> Counter[str]:
    return Counter(issue.unit for issue in issues(program) if isinstance(issue, Gather))


def run(program: Program, spec: ProgramSpec) -> None:
    """Follow a program: every use has its unit, and no buffer overlaps another one."""
    held: dict[str, Gather] = {}
    in_use: set[str] = set()

    def do(issue: Issue) -> None:
        if isinstance(issue, Drop):
            assert issue.unit not in in_use
            del held[issue.unit]
        elif isinstance(issue, Gather):
            end = issue.offset + spec.padded[issue.unit]
            assert issue.unit not in held
            assert 0 <= issue.offset < end <= program.weights
            for other in held.values():
                assert end <= other.offset or other.offset + spec.padded[other.unit] <= issue.offset
            held[issue.unit] = issue
        else:
            assert issue.offset is None or issue.offset + spec.padded[issue.unit] <= program.gradients

    for issue in program.start:
        do(issue)
    for one in program.passes:
        for point in one.points:
            if point.at is At.DONE:
                in_use.remove(point.unit)
            for issue in point.issues:
                do(issue)
            if point.at is At.USE:
                assert point.unit in held
                in_use.add(point.unit)
    assert not held
    assert not in_use


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("blocks", range(1, 13))
def test_blocks_with_room_for_some_are_gathered_as_often_as_belady_says(blocks: int, microbatches: int) -> None:
    """A pass turns 2a - 1 times in a step of a microbatches; at each turn, as many blocks stay as there is room for."""
    spec = replace(spec_of(12, microbatches), resident=blocks * BLOCK + EMBEDDING + HEAD)
    program = Programs(spec).step
    found = gathers(program)
    assert (
        sum(found[f"blocks.{index}"] for index in range(12)) == 2 * microbatches * 12 - (2 * microbatches - 1) * blocks
    )
    assert program.weights <= spec.resident
    run(program, spec)


def test_what_fits_is_gathered_once_and_before_the_first_pass() -> None:
    spec = replace(spec_of(3, 4), resident=10**6)
    program = Programs(spec).step
    assert set(gathers(program).values()) == {1}
    assert len([issue for issue in program.start if isinstance(issue, Gather)]) == 5
    assert program.weights == 3 * BLOCK + EMBEDDING + HEAD


def test_by_default_two_units_are_gathered_ahead() -> None:
    spec = spec_of(12, 4)
    program = Programs(spec).step
    assert program.weights == 3 * BLOCK
    assert [issue.unit for issue in program.start if isinstance(issue, Gather)][:3] == [
        "embedding",
        "blocks.0",
        "blocks.1",
    ]
    run(program, spec)
    late = [
        point
        for one in program.passes
        for point in one.points
        for issue in point.issues
        if point.at is At.USE and isinstance(issue, Gather) and issue.unit == point.unit
    ]
    assert late == []


@given(
    layers=st.integers(1, 9), microbatches=st.integers(1, 4), tied=st.booleans(), recompute=st.integers(0, 3),
    room=st.floats(0, 1.2), secondary=st.sampled_from([0, 1, 2, 8]), rounded=st.booleans(),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_any_budget_above_the_least_runs(
    layers: int, microbatches: int, tied: bool, recompute: int, room: float, secondary: int, rounded: bool
) -> None:
    spec = spec_of(layers, microbatches, Degrees(8, 4, 8, 8, secondary), tied, recompute)
    alone = Programs(replace(spec, resident=1)).step
    whole = sum(spec.padded.values())
    spec = replace(spec, resident=alone.weights + int(room * (whole - alone.weights)), rounded=rounded)
    program = Programs(spec).step
    run(program, spec)
    assert program.weights <= spec.resident
    filled = [issue.unit for issue in issues(program) if isinstance(issue, Gather) and issue.fills]
    assert len(filled) == len(set(filled))
    assert sorted(filled) == (sorted(spec.padded) if secondary else [])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_unit_is_reduced_once_for_each_microbatch(name: ScheduleName, tied: bool) -> None:
    chunks = 2 if name in ("interleaved", "zero-bubble-v") else 1
    schedule = make_schedule(name, 2, chunks, 4)
    for rank in range(2):
        stages = tuple(
            StageLayout(
                stage=stage,
                first=2 * stage,
                end=2 * stage + 2,
                opens=stage == 0,
                closes=stage == schedule.stages - 1,
                tied=tied,
            )
            for stage in (schedule.stage(rank, chunk) for chunk in range(chunks))
        )
        padded = {unit: BLOCK for stage in stages for unit in stage.units}
        spec = ProgramSpec(
            stages=stages, actions=schedule.actions[rank], splits_backward=schedule.splits_backward, padded=padded,
            degrees=dict.fromkeys(padded, STAGE3),
        )  # fmt: skip
        program = Programs(spec).step
        run(program, spec)
        reduces = [issue for issue in issues(program) if isinstance(issue, Reduce)]
        passes = Counter(unit for stage in stages for unit in stage.units)
        assert Counter(issue.unit for issue in reduces) == {unit: 4 * count for unit, count in passes.items()}
        for unit in padded:
            own = [issue for issue in reduces if issue.unit == unit]
            assert [issue.first for issue in own] == [True] + [False] * (len(own) - 1)
            assert [issue.last for issue in own] == [False] * (len(own) - 1) + [True]


def test_message_driven_gathers_every_unit_once_in_the_first_forward_pass() -> None:
    """The order of all later actions may differ from replica to replica."""
    stage = StageLayout(stage=1, first=3, end=6, opens=False, closes=False, tied=False)
    actions = tuple(Action(index, 0, kind) for kind in (Kind.F, Kind.B) for index in range(3))
    padded = dict.fromkeys(stage.units, BLOCK)
    spec = ProgramSpec(
        stages=(stage,), actions=actions, ordered=False, padded=padded, degrees=dict.fromkeys(padded, STAGE3)
    )
    program = Programs(spec).step
    assert {type(issue) for issue in program.start} == {Gather}
    assert len(program.start) == 3
    later = [issue for one in program.passes[1:-1] for point in one.points for issue in point.issues]
    assert {type(issue) for issue in later} == {Reduce}


def test_evaluation_gathers_units_in_the_order_of_the_model() -> None:
    spec = spec_of(4, 1, tied=True)
    program = Programs(spec).evaluation([2, 1])
    assert [one.action for one in program.passes] == [Action(index, 0, Kind.F) for index in range(3)]
    run(program, spec)
    assert not any(isinstance(issue, Reduce) for issue in issues(program))


def test_gradients_never_overlap_those_before_them() -> None:
    sizes = [HEAD, BLOCK, BLOCK, EMBEDDING, HEAD, BLOCK]
    offsets = paired_offsets(sizes)
    for first, second in zip(range(5), range(1, 6), strict=True):
        low, high = sorted([(offsets[first], sizes[first]), (offsets[second], sizes[second])])
        assert low[0] + low[1] <= high[0]
    assert max(offset + size for offset, size in zip(offsets, sizes, strict=True)) == paired_size(sizes) == 2 * BLOCK
    assert paired_size([]) == 0
    assert paired_size([5]) == 5


def test_a_buffer_pool_has_gaps_at_both_ends() -> None:
    pool = BufferPool(10)
    assert [pool.take(2, low=False), pool.take(2, low=False), pool.take(6, low=True)] == [8, 6, 0]
    assert not pool.fits(1)
    pool.give_back(8)
    assert pool.fits(2)
    assert not pool.fits(3)
    assert pool.take(1, low=False) == 9
    assert pool.high == 10
    assert pool.take(3, low=True) == 10, "what has no room lies behind"
    assert pool.high == 13


@pytest.mark.parametrize("resident", ["auto", "9364154311", "3GB"])
def test_gathered_weights_begin_at_addresses_for_wide_copies(resident: str) -> None:
    """Copies of 16 bytes at once, and the fast matrix products, need addresses that are multiples of these."""
    recipe = load_recipe("llama-8b", ["zero.stage=3", f"zero.resident={resident}", "data.path=set"])
    machine = Cluster(accelerator=Accelerator(memory="80GB"), node=Node(ranks=8))
    plan = make_plan(recipe, Facts(world=8, device="cuda", cluster=machine))
    found = [issue for issue in issues(Programs(ProgramSpec.of(plan, 0)).step) if isinstance(issue, Gather)]
    assert found
    assert {issue.offset * plan.compute_bytes % 64 for issue in found} == {0}


@pytest.mark.parametrize("extra", [[], ["model.tie_embeddings=true"], ["activation_checkpointing={every: 2}"]])
@pytest.mark.parametrize("schedule", ["zero-bubble", "message-driven", "1f1b"])
def test_the_least_memory_for_gathered_weights_is_enough(schedule: str, extra: list[str], tmp_path: Path) -> None:
    keys = ["zero.stage=3", "parallel.pipeline=2", f"pipeline.schedule={schedule}", "train.microbatch=1", *extra]
    facts = Facts(world=4, device="cpu")
    plan = make_plan(small(tmp_path, *keys), facts)
    least = max(least_resident(plan, rank) for rank in range(4))
    assert resident_problem(make_plan(small(tmp_path, *keys, f"zero.resident={least}"), facts)) is None
    said = resident_problem(make_plan(small(tmp_path, *keys, f"zero.resident={least - 1}"), facts))
    assert said is not None
    assert f"set zero.resident={least}" in said


@given(
    sizes=st.tuples(*[st.integers(1, 12)] * 3),
    layers=st.integers(1, 8),
    microbatches=st.integers(1, 3),
    groups=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    tied=st.booleans(),
    resident=st.integers(0, 60),
)
@settings(deadline=None)
@example(sizes=(4, 9, 8), layers=8, microbatches=3, groups=[1], tied=True, resident=51)
@example(sizes=(6, 12, 5), layers=2, microbatches=2, groups=[1], tied=True, resident=22)
def test_an_evaluation_fits_into_the_memory_of_a_step(
    sizes: tuple[int, int, int], layers: int, microbatches: int, groups: list[int], tied: bool, resident: int
) -> None:
    """Whatever gaps units of unlike sizes leave."""
    embedding, block, head = sizes
    spec = replace(spec_of(layers, microbatches, tied=tied), resident=resident)
    padded = dict.fromkeys(spec.padded, block) | {"embedding": embedding, "head": head}
    programs = Programs(replace(spec, padded=padded))
    assert programs.evaluation(groups).weights <= programs.step.weights


def small(folder: Path, *overrides: str) -> Recipe:
    path = folder / "small.yaml"
    path.write_text(
        "model: {family: llama, layers: 4, hidden: 32, heads: 4, vocab: 100}\n"
        "data: {path: d, sequence_length: 16}\ntrain: {steps: 200, global_batch: 16}\n"
    )
    return load_recipe(str(path), overrides)


def test_a_program_as_text_shares_the_lines_of_passes_that_issue_the_same() -> None:
    lines = list(program_lines(Programs(spec_of(4, 4)).step))
    assert lines[:3] == [
        "order: F0 B0 F1 B1 F2 B2 F3 B3",
        "start: gather embedding, gather blocks.0, gather blocks.1",
        "F0 F1 F2 F3:",
    ]
    assert lines.count("B0 B1 B2:") == lines.count("B3:") == 1
    assert "  after blocks.1: drop blocks.1, gather head" in lines
    assert "  gradients of head: reduce, complete the step's sum" in lines
