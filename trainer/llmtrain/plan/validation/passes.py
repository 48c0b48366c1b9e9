"""Whether a program has the passes of its schedule, the points of each pass, and the right reductions at them.

No torch in here.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest

from llmtrain.plan.program.instructions import At, BackwardPass, Pass, Program, Reduce, ReplicaSum
from llmtrain.plan.program.points import Spot, backward_passes, spots_of
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.plan.validation.places import ProgramPlace, pass_issues


def pass_problems(spec: ProgramSpec, program: Program) -> Iterator[str]:
    """Yield the problems of a program's passes."""
    yield from _order_problems(spec, program)
    for issue in program.start:
        if isinstance(issue, Reduce):
            yield f"start: it reduces {issue.unit} before its first backward pass"
    expected = set(spec.actions)
    passes = [one for one in program.passes if one.action in expected]
    backward = backward_passes([one.action for one in passes], spec.stages, spec.splits_backward, spec.sums_runs)
    reduced = set[str]()
    for one, own in zip(passes, backward, strict=True):
        by_unit = {passed.unit: passed for passed in own}
        yield from _flag_problems(one, by_unit)
        yield from _point_problems(spec, one, by_unit)
        yield from _reduce_problems(spec, one, by_unit, reduced)
        reduced |= {unit for unit, passed in by_unit.items() if spec.is_reduced(passed)}
    yield from _finish_problems(spec, program)


def _order_problems(spec: ProgramSpec, program: Program) -> Iterator[str]:
    """Yield missing, doubled and foreign passes; if there are none, the first that is out of order."""
    found = [one.action for one in program.passes]
    expected, counted = Counter(spec.actions), Counter(found)
    for action in dict.fromkeys((*spec.actions, *found)):
        if action not in expected:
            yield f"pass {action}: the schedule has no such pass"
        elif not counted[action]:
            yield f"pass {action}: the program lacks it"
        elif counted[action] > expected[action]:
            yield f"pass {action}: the program has it {counted[action]} times; expected {expected[action]}"
    if expected == counted:
        for number, (action, scheduled) in enumerate(zip(found, spec.actions, strict=True), 1):
            if action != scheduled:
                yield f"pass {action}: it is number {number} of the program, but the schedule has {scheduled} there"
                return


def _flag_problems(one: Pass, expected: Mapping[str, BackwardPass]) -> Iterator[str]:
    """Yield the backward passes through units that are missing, doubled, foreign, or say the wrong first or last."""
    counted = Counter(passed.unit for passed in one.backward)
    for unit in dict.fromkeys((*expected, *counted)):
        wanted = int(unit in expected)
        if counted[unit] != wanted:
            yield f"pass {one.action}: it has {counted[unit]} backward passes through {unit}; expected {wanted}"
    for passed in one.backward:
        right = expected.get(passed.unit, passed)
        for flag in ("first", "last", "leading", "begins_run", "ends_run"):
            said, holds = getattr(passed, flag), getattr(right, flag)
            if said != holds:
                yield (
                    f"pass {one.action}: the backward pass through {passed.unit} has {flag} {said}; expected {holds}"
                )


def _point_problems(spec: ProgramSpec, one: Pass, backward: Mapping[str, BackwardPass]) -> Iterator[str]:
    """Yield the first point that is missing, foreign or out of order."""
    found = [(point.at, point.unit) for point in one.points]
    expected = _expected_points(spec, one, backward)
    for number in range(max(len(found), len(expected))):
        own, right = found[number : number + 1], expected[number : number + 1]
        if own != right:
            yield f"pass {one.action}: point {number + 1} is {_named(own)}; expected {_named(right)}"
            return


def _expected_points(spec: ProgramSpec, one: Pass, backward: Mapping[str, BackwardPass]) -> list[Spot]:
    """Return the points at which a rank may issue something: uses of weights that are gathered, and gradients that are
    reduced."""
    spots = spots_of(one.action, spec.stages[one.action.chunk], spec.splits_backward)
    return [
        (at, unit)
        for at, unit in spots
        if (spec.is_reduced(backward[unit]) if at is At.GRADIENTS else spec.is_gathered(unit))
    ]


def _reduce_problems(
    spec: ProgramSpec, one: Pass, backward: Mapping[str, BackwardPass], reduced: Collection[str]
) -> Iterator[str]:
    """Yield the units that a pass does not reduce as often as it should, and reductions in the wrong place or with the
    wrong flags. reduced: units that were reduced before."""
    expected = {unit for unit, passed in backward.items() if spec.is_reduced(passed)}
    counted: Counter[str] = Counter()
    for place, issue in pass_issues(one):
        if not isinstance(issue, Reduce):
            continue
        counted[issue.unit] += 1
        if issue.unit in expected:
            passed = backward[issue.unit]
            # A buffer has the gradients of all passes since the reduction before.
            first = issue.unit not in reduced if spec.is_buffered(issue.unit) else passed.first
            yield from _wrong_reduce(spec, place, issue, replace(passed, first=first))
    for unit in dict.fromkeys((*backward, *counted)):
        wanted = int(unit in expected)
        if counted[unit] != wanted:
            yield f"pass {one.action}: it reduces {unit} {counted[unit]} times; expected {wanted}"


def _wrong_reduce(spec: ProgramSpec, place: ProgramPlace, issue: Reduce, passed: BackwardPass) -> Iterator[str]:
    point = place.point
    if point is None or (point.at, point.unit) != (At.GRADIENTS, issue.unit):
        yield f"{place}: it reduces {issue.unit} here; expected at its gradients"
    for flag in ("first", "last"):
        said, holds = getattr(issue, flag), getattr(passed, flag)
        if said != holds:
            yield f"{place}: the reduction of {issue.unit} has {flag} {said}; expected {holds}"
    if issue.partial != (expected := spec.partial.get(issue.unit, 0)):
        yield (
            f"{place}: before the reduction of {issue.unit}, tensor-parallel ranks sum {issue.partial} elements; "
            f"expected {expected}"
        )
    buffered = spec.is_buffered(issue.unit)
    if buffered and issue.offset is None:
        yield f"{place}: the reduction of {issue.unit} has no buffer, but its gradients are sharded"
    if not buffered and issue.offset is not None:
        yield f"{place}: the reduction of {issue.unit} has a buffer, but its gradients are not sharded"


def _finish_problems(spec: ProgramSpec, program: Program) -> Iterator[str]:
    """Yield the first sum over replicas that is missing, foreign or out of order."""
    for number, (found, expected) in enumerate(zip_longest(program.finish, spec.finish), 1):
        if found != expected:
            yield f"end of the passes: sum {number} is {_sum_named(found)}; expected {_sum_named(expected)}"
            return


def _sum_named(one: ReplicaSum | None) -> str:
    return "missing" if one is None else f"{one.elements} elements of {one.unit or 'all units'} over {one.group} ranks"


def _named(spots: list[Spot]) -> str:
    return " ".join((spots[0][0].value, spots[0][1])) if spots else "missing"
