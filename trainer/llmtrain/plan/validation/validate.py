"""Checks the programs of all ranks of a run: within each rank, and between the ranks. No torch in here.

It finds instructions that a rank cannot run, collectives that differ between the ranks of a group, and deadlocks.
"""

from collections.abc import Iterator, Mapping, Sequence

from llmtrain.plan.plan import Plan
from llmtrain.plan.program.instructions import Program
from llmtrain.plan.validation.buffers import gradient_problems, weight_problems
from llmtrain.plan.validation.deadlock import deadlock_problems
from llmtrain.plan.validation.grid import RankPart, RankPrograms, evaluation_programs, step_programs
from llmtrain.plan.validation.groups import group_problems
from llmtrain.plan.validation.message_driven import message_driven_problems
from llmtrain.plan.validation.passes import pass_problems


def step_problems(plan: Plan) -> list[str]:
    """Return every problem of a plan's programs of a step, each as a sentence; empty if there is none."""
    return program_problems(plan, step_programs(plan))


def evaluation_problems(plan: Plan) -> list[str]:
    """Return every problem of a plan's programs of an evaluation that has whole groups of microbatches, and a smaller
    last one."""
    together = plan.pipeline.schedule.evaluated_together
    groups = (together, together, 1)
    return program_problems(plan, evaluation_programs(plan, groups), groups)


def program_problems(plan: Plan, programs: Mapping[int, Program], groups: Sequence[int] | None = None) -> list[str]:
    """Return every problem of given programs of a step, each as a sentence; empty if there is none.

    A sentence names the rank, the pass, the point and the unit, as far as it has them. programs: of all ranks of the
    run, by rank. Ranks with the same object are checked once. groups: sizes of the groups of microbatches, if the
    programs are those of an evaluation.
    """
    ranks = RankPrograms(plan, programs, groups)
    return [*_rank_problems(ranks), *_evaluation_problems(ranks), *group_problems(ranks), *deadlock_problems(ranks)]


def _rank_problems(ranks: RankPrograms) -> Iterator[str]:
    by_key: dict[tuple[object, ...], list[int]] = {}
    for rank, program in ranks.programs.items():
        key = (id(program), ranks.coordinates(rank)[0], *ranks.part(rank).spec.padded.items())
        by_key.setdefault(key, []).append(rank)
    for same in by_key.values():
        yield from (f"{_named(same)}, {text}" for text in _problems(ranks.part(same[0]), ranks.programs[same[0]]))


def _evaluation_problems(ranks: RankPrograms) -> Iterator[str]:
    """Yield the ranks whose evaluation does not fit the memory that was allocated for a step."""
    steps = step_programs(ranks.plan) if ranks.groups is not None else {}
    for rank, step in steps.items():
        if ranks.programs[rank].weights > step.weights:
            yield (
                f"rank {rank}, the pool of gathered weights has {ranks.programs[rank].weights} elements, above the "
                f"{step.weights} of a step"
            )


def _problems(part: RankPart, program: Program) -> Iterator[str]:
    yield from pass_problems(part.spec, program)
    yield from weight_problems(part.spec, program)
    yield from gradient_problems(part.spec, program)
    if not part.spec.ordered and not part.evaluates:
        yield from message_driven_problems(program)


def _named(same: Sequence[int]) -> str:
    if len(same) == 1:
        return f"rank {same[0]}"
    more = f" and {len(same) - 4} more" if len(same) > 4 else ""
    return f"ranks {', '.join(map(str, same[:4]))}{more}"
