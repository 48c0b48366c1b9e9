"""Programs of many microbatches are planned from a few periods of their passes, with the same result."""

from dataclasses import replace
from random import Random

import pytest
from llmtrain.cluster.levels import Degrees
from llmtrain.plan.pipeline.schedules import make_schedule
from llmtrain.plan.pipeline.stage_layout import StageLayout
from llmtrain.plan.program.build import Programs, full_program
from llmtrain.plan.program.instructions import Program
from llmtrain.plan.program.points import backward_passes
from llmtrain.plan.program.repeats import shorten
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.recipe.pipeline import ScheduleName

SCHEDULES: tuple[ScheduleName, ...] = (
    "gpipe", "1f1b", "interleaved", "breadth-first", "zero-bubble", "zero-bubble-v"
)  # fmt: skip


def plain(spec: ProgramSpec) -> Program:
    """Return the program with each pass planned."""
    return full_program(
        spec, spec.actions, backward_passes(spec.actions, spec.stages, spec.splits_backward, spec.sums_runs)
    )


def random_spec(random: Random, name: ScheduleName) -> ProgramSpec:
    """Return a rank's part of a small run. The memory for gathered weights is the default, or up to all of them."""
    choose, ranks = random.choice, random.choice((2, 3))
    chunks = {"interleaved": choose((2, 3)), "breadth-first": choose((2, 4)), "zero-bubble-v": 2}.get(name, 1)
    schedule = make_schedule(name, ranks, chunks, choose((20, 33, 60)))
    rank, layers, tied = random.randrange(ranks), choose((1, 2, 5)), choose((True, False))
    held = [schedule.stage(rank, chunk) for chunk in range(chunks)]
    stages = tuple(
        StageLayout(
            stage=stage,
            first=layers * stage,
            end=layers * (stage + 1),
            opens=stage == 0,
            closes=stage == schedule.stages - 1,
            tied=tied,
            recompute=0 if schedule.splits_backward else choose((0, 1, 2)),
        )
        for stage in held
    )
    sizes = choose(((1024,), (1024, 1024, 640, 3000)))
    padded = {unit: choose(sizes) for stage in stages for unit in stage.units}
    spec = ProgramSpec(
        stages=stages,
        actions=schedule.actions[rank],
        splits_backward=schedule.splits_backward,
        padded=padded,
        degrees=dict.fromkeys(padded, Degrees(8, 4, 8, 8, choose((0, 0, 2, 4, 8)))),
        rounded=choose((True, False)),
        sums_runs=name == "breadth-first",
    )
    least = plain(replace(spec, resident=1)).weights
    room = least + int(random.uniform(0, 1.1) * max(0, sum(padded.values()) - least))
    return replace(spec, resident=choose((0, room, room)))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seed", range(4))
def test_a_few_periods_give_the_program_of_all(name: ScheduleName, seed: int) -> None:
    random = Random(seed)
    for _ in range(4):
        spec = random_spec(random, name)
        assert Programs(spec).step == plain(spec)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
def test_how_many_passes_are_planned_does_not_depend_on_the_microbatches(name: ScheduleName) -> None:
    for microbatches in (50, 500):
        actions = make_schedule(name, 4, 1, microbatches).actions[0]
        short = shorten(actions, 2)
        assert len(short.actions) < 60 < len(actions)
        left_out = sum(repeat.length * repeat.copies for repeat in short.repeats)
        assert len(short.actions) + left_out == len(actions)


def test_what_does_not_repeat_is_planned_whole() -> None:
    actions = make_schedule("1f1b", 2, 1, 8).actions[0]
    assert shorten(actions, 2).actions == list(actions)
    assert shorten((), 2).actions == []
