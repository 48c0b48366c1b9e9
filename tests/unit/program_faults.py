"""Faults of programs: each breaks one thing in the valid programs of all ranks."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmtrain.plan.program.instructions import Gather, Issue, Pass, Point, Program, Reduce
from llmtrain.plan.validation.grid import step_programs
from llmtrain.plan.validation.validate import program_problems

from tests.unit.program_plans import small_plan

Programs = Mapping[int, Program]
Change = Callable[[Program], Program]
Fault = Callable[[Programs], Programs]
Edit = Callable[[tuple[Issue, ...]], tuple[Issue, ...]]


def on(rank: int, change: Change) -> Fault:
    """Return a fault of one rank's program."""
    return lambda programs: {**programs, rank: change(programs[rank])}


def on_role(rank: int, change: Change) -> Fault:
    """Return a fault of the program of a rank and of all that are alike."""

    def fault(programs: Programs) -> Programs:
        broken = change(programs[rank])
        return {one: broken if program is programs[rank] else program for one, program in programs.items()}

    return fault


def in_pass(name: str, change: Callable[[Pass], Pass]) -> Change:
    def changed(program: Program) -> Program:
        assert name in map(str, (one.action for one in program.passes))
        return replace(program, passes=tuple(change(p) if str(p.action) == name else p for p in program.passes))

    return changed


def at(place: str, edit: Edit) -> Change:
    """Change what is issued at a place such as `B0 gradients blocks.1`."""
    action, _, point = place.partition(" ")

    def points(one: Pass) -> Pass:
        assert point in map(str, one.points), list(map(str, one.points))
        return one._replace(
            points=tuple(replace(p, issues=edit(p.issues)) if str(p) == point else p for p in one.points)
        )

    return in_pass(action, points)


def everywhere(edit: Edit) -> Change:
    """Change what is issued at the start, and at each point."""

    def changed(program: Program) -> Program:
        passes = tuple(
            one._replace(points=tuple(replace(p, issues=edit(p.issues)) for p in one.points)) for one in program.passes
        )
        return replace(program, start=edit(program.start), passes=passes)

    return changed


def without(kind: type, unit: str, count: int = 1) -> Change:
    """Remove the first instructions of a kind about a unit."""
    left = [count]

    def keeps(issue: Issue) -> bool:
        found = isinstance(issue, kind) and issue.unit == unit and left[0] > 0
        left[0] -= found
        return not found

    return everywhere(lambda issues: tuple(filter(keeps, issues)))


def altered(kind: type, unit: str, **fields: object) -> Change:
    """Change fields of all instructions of a kind about a unit."""
    return everywhere(
        lambda issues: tuple(
            replace(one, **fields) if isinstance(one, kind) and one.unit == unit else one  # type: ignore[arg-type]
            for one in issues
        )
    )


def adds(*issues: Issue) -> Edit:
    return lambda before: (*before, *issues)


def swap_passes(first: int, second: int) -> Change:
    def changed(program: Program) -> Program:
        passes = list(program.passes)
        passes[first], passes[second] = passes[second], passes[first]
        return replace(program, passes=tuple(passes))

    return changed


def swap_points(one: Pass) -> Pass:
    first, second, *rest = one.points
    return one._replace(points=(second, first, *rest))


def swap_start(program: Program) -> Program:
    first, second, *rest = program.start
    return replace(program, start=(second, first, *rest))


def ordered(*names: str) -> Change:
    """Put the first passes of a program in this order."""

    def changed(program: Program) -> Program:
        by_name = {str(one.action): one for one in program.passes}
        assert set(names) == set(list(by_name)[: len(names)])
        return replace(program, passes=(*(by_name[name] for name in names), *program.passes[len(names) :]))

    return changed


def swap_reductions(program: Program) -> Program:
    """Exchange the first reductions of blocks.3 and blocks.2."""
    found: dict[str, Issue] = {}
    for point in program.passes[1].points:
        found.update({one.unit: one for one in point.issues if isinstance(one, Reduce)})
    other = {found["blocks.3"]: found["blocks.2"], found["blocks.2"]: found["blocks.3"]}
    return in_pass("B0", lambda one: one._replace(points=tuple(_exchanged(point, other) for point in one.points)))(
        program
    )


def _exchanged(point: Point, other: Mapping[Issue, Issue]) -> Point:
    return replace(point, issues=tuple(other.get(issue, issue) for issue in point.issues))


def summed_at(unit: str, offset: int, *passes: str) -> Change:
    """Put the gradients of a unit elsewhere, in some backward passes."""

    def moved(one: Pass) -> Pass:
        return one._replace(backward=tuple(replace(b, offset=offset) if b.unit == unit else b for b in one.backward))

    def changed(program: Program) -> Program:
        for name in passes:
            program = in_pass(name, moved)(program)
        return program

    return changed


def with_flags(one: Pass, **flags: Any) -> Pass:
    first, *rest = one.backward
    return one._replace(backward=(replace(first, **flags), *rest))


def both(*faults: Fault) -> Fault:
    def fault(programs: Programs) -> Programs:
        for one in faults:
            programs = one(programs)
        return programs

    return fault


def from_secondary(program: Program) -> Program:
    """Take the weights of blocks.2 from the secondary copy from the start."""
    return altered(Gather, "blocks.2", secondary=True, fills=False)(program)


def removals(program: Program) -> Iterator[Program]:
    """Yield each way to remove one instruction."""
    yield from (
        replace(program, start=(*program.start[:place], *program.start[place + 1 :]))
        for place in range(len(program.start))
    )
    for place in range(len(program.finish)):
        yield replace(program, finish=(*program.finish[:place], *program.finish[place + 1 :]))
    for number, one in enumerate(program.passes):
        for spot, point in enumerate(one.points):
            for place in range(len(point.issues)):
                less = replace(point, issues=(*point.issues[:place], *point.issues[place + 1 :]))
                changed = one._replace(points=(*one.points[:spot], less, *one.points[spot + 1 :]))
                yield replace(program, passes=(*program.passes[:number], changed, *program.passes[number + 1 :]))


def check_step_fault(fault: tuple[str, Fault, list[str]], folder: Path) -> None:
    """Check that a fault in the programs of a step is found. fault: the plan's name, what breaks its programs, and a
    pattern of each sentence that is expected."""
    name, breaks, expected = fault
    plan = small_plan(folder, name)
    check_sentences(program_problems(plan, breaks(step_programs(plan))), expected)


def check_sentences(found: Sequence[str], expected: Sequence[str]) -> None:
    """Check that each pattern of `expected` is in one of the sentences."""
    for words in expected:
        assert any(re.search(words, sentence) for sentence in found), "\n".join((words, *found))
