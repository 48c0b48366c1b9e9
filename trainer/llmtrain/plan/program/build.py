"""The programs of a rank's optimizer step and of an evaluation. No torch in here."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from llmtrain.plan.pipeline.actions import Action, Kind
from llmtrain.plan.program.buffer_pool import paired_offsets, paired_size
from llmtrain.plan.program.instructions import At, BackwardPass, Gather, Issue, Pass, Point, Program, Reduce
from llmtrain.plan.program.points import Spot, backward_passes, spots_of
from llmtrain.plan.program.repeats import shorten
from llmtrain.plan.program.residency import Units, UnitUse, lookahead_capacity, reside
from llmtrain.plan.program.spec import ProgramSpec


@dataclass(frozen=True)
class Programs:
    """The programs of a rank."""

    spec: ProgramSpec

    @cached_property
    def step(self) -> Program:
        """The program of one optimizer step."""
        return _step(self.spec)

    @cached_property
    def from_secondary(self) -> frozenset[str]:
        """The units that a step gathers from their secondary copies."""
        # Nothing is gathered from a copy before the first pass has filled it.
        issues = (issue for one in self.step.passes for point in one.points for issue in point.issues)
        return frozenset(issue.unit for issue in issues if isinstance(issue, Gather) and issue.secondary)

    def evaluation(self, groups: Sequence[int]) -> Program:
        """Return the program of an evaluation: forward passes of groups of microbatches, each group through all chunks.
        groups: microbatches of each. Gathered weights fit into the step's memory for them."""
        actions = evaluation_actions(len(self.spec.stages), groups)
        return _program(self.spec, actions, lambda actions: [()] * len(actions), self.step.weights)


# Recipes that are tried one after another often have the same programs.
@lru_cache(maxsize=16)
def _step(spec: ProgramSpec) -> Program:
    found = _program(
        spec,
        spec.actions,
        lambda actions: backward_passes(actions, spec.stages, spec.splits_backward, spec.sums_runs),
    )
    return replace(found, finish=spec.finish)


def evaluation_actions(chunks: int, groups: Sequence[int]) -> list[Action]:
    """Return the actions of an evaluation in order. groups: see `Programs.evaluation`."""
    first, actions = 0, list[Action]()
    for count in groups:
        for chunk in range(chunks):
            actions += [Action(index, chunk, Kind.F) for index in range(first, first + count)]
        first += count
    return actions


_Backward = Callable[[Sequence[Action]], Sequence[tuple[BackwardPass, ...]]]


def _program(spec: ProgramSpec, actions: Sequence[Action], backward: _Backward, most: int | None = None) -> Program:
    """Return the program of actions. backward: the backward passes of each. most: see `full_program`."""
    # In two periods, gradients are at both of their offsets, and most buffers of weights are where they were.
    for periods in (2, 4, 6):
        short = shorten(actions, periods)
        program = short.extended(full_program(spec, short.actions, backward(short.actions), most))
        if program is not None:
            return program
    return full_program(spec, actions, backward(actions), most)


def full_program(
    spec: ProgramSpec,
    actions: Sequence[Action],
    backward: Sequence[tuple[BackwardPass, ...]],
    most: int | None = None,
) -> Program:
    """Return the program of actions, each of which is planned. backward: the backward passes of each. most: elements of
    memory for gathered weights; None for as the spec says."""
    spots = [list(spots_of(action, spec.stages[action.chunk], spec.splits_backward)) for action in actions]
    offsets, gradients = _gradient_offsets(spots, backward, spec)
    if offsets:
        backward = [
            tuple(replace(one, offset=offsets.get((index, one.unit))) for one in passed)
            for index, passed in enumerate(backward)
        ]
    reduces, passes = _reduces(spots, backward, spec), list[Pass]()
    (start, *gathers), weights = _gathers(spec, list(_events(actions, spots, spec)), most)
    following = iter(gathers)
    for action, own, passed, reducing in zip(actions, spots, backward, reduces, strict=True):
        points = []
        for at, unit in own:
            issues: list[Issue]
            if at is At.GRADIENTS:
                issues = [reducing[unit]] if unit in reducing else []
            elif spec.is_gathered(unit):
                issues = next(following)
            else:
                continue
            if issues or at is not At.GRADIENTS:
                points.append(Point(at, unit, tuple(issues)))
        passes.append(Pass(action, tuple(points), passed))
    return Program(start=tuple(start), passes=tuple(passes), weights=weights, gradients=gradients)


def _gathers(spec: ProgramSpec, events: Sequence[UnitUse], most: int | None) -> tuple[list[list[Issue]], int]:
    capacity = residency_capacity(spec, events)
    # Buffers of different sizes may leave other gaps than in a step. At worst, nothing is gathered ahead.
    capacity = capacity if most is None else min(capacity, most)
    return reside(events, residency_units(spec), capacity)


def residency_units(spec: ProgramSpec) -> Units:
    """Return the units that a rank gathers."""
    sizes = {name: size for name, size in spec.padded.items() if spec.is_gathered(name)}
    filled = frozenset(name for name in sizes if spec.degrees[name].secondary)
    return Units(sizes, spec.rounded, filled, spec.granule)


def residency_capacity(spec: ProgramSpec, events: Sequence[UnitUse]) -> int:
    """Return the elements of memory for gathered weights. events: the uses of gathered units in a step."""
    sizes = residency_units(spec).sizes
    # Messages arrive in another order on each replica, but gathers must not: every unit is gathered once, and stays.
    capacity = sum(sizes.values())
    return min(spec.resident or lookahead_capacity(events, sizes), capacity) if spec.ordered else capacity


def residency_events(spec: ProgramSpec, actions: Sequence[Action]) -> Iterator[UnitUse]:
    """Yield the uses of gathered units in actions."""
    spots = [list(spots_of(action, spec.stages[action.chunk], spec.splits_backward)) for action in actions]
    yield from _events(actions, spots, spec)


def _events(actions: Sequence[Action], spots: Sequence[list[Spot]], spec: ProgramSpec) -> Iterator[UnitUse]:
    used: set[str] = set()
    for action, own in zip(actions, spots, strict=True):
        for at, unit in own:
            if at is not At.GRADIENTS and spec.is_gathered(unit):
                yield UnitUse(at, unit, unit in used and serves_secondary(spec, unit, action.kind))
                if at is At.DONE:
                    used.add(unit)


def serves_secondary(spec: ProgramSpec, unit: str, kind: Kind) -> bool:
    """Whether a unit's weights come from its filled secondary copy: always in a backward pass, and in a forward pass
    only if the copy has no more shards than the weights.

    Without a fixed order of passes (message-driven), backward passes follow the rule of forward passes. kind: of the
    pass.
    """
    degrees = spec.degrees[unit]
    # Without an order, backward passes run between forward passes. Both use what stays gathered.
    backward = kind is not Kind.F and spec.ordered
    return degrees.secondary > 0 and (backward or degrees.secondary <= degrees.weights)


def _reduces(
    spots: Sequence[list[Spot]], backward: Sequence[tuple[BackwardPass, ...]], spec: ProgramSpec
) -> list[dict[str, Reduce]]:
    """Return for each action the reductions of units, in the order in which their gradients are complete. backward:
    with offsets."""
    found, before = list[dict[str, Reduce]](), set[str]()
    for own, passed in zip(spots, backward, strict=True):
        passes = {one.unit: one for one in passed}
        reduced = [passes[unit] for at, unit in own if at is At.GRADIENTS and spec.is_reduced(passes[unit])]
        found.append({one.unit: _reduce(spec, one, before) for one in reduced})
        before |= {one.unit for one in reduced}
    return found


def _reduce(spec: ProgramSpec, closing: BackwardPass, before: Collection[str]) -> Reduce:
    """Return the reduction after the last pass of a run. before: units that were reduced before."""
    first = closing.first if closing.offset is None else closing.unit not in before
    return Reduce(closing.unit, closing.offset, first, closing.last, spec.partial.get(closing.unit, 0))


def _gradient_offsets(
    spots: Sequence[list[Spot]], backward: Sequence[tuple[BackwardPass, ...]], spec: ProgramSpec
) -> tuple[dict[tuple[int, str], int], int]:
    """Return the offset of the buffer of each unit whose gradients have one, by the index of the action, and the
    elements of the pool. Buffers that are in use at the same time are beside each other, and those of one run beside
    those of the run before."""
    runs = list(_runs(spots, backward, spec))
    sizes = [sum(spec.padded[unit] for unit in {unit for _, unit in run}) for run in runs]
    found: dict[tuple[int, str], int] = {}
    for run, start in zip(runs, paired_offsets(sizes), strict=True):
        within = dict[str, int]()
        for index, unit in run:
            if unit not in within:
                within[unit], start = start, start + spec.padded[unit]
            found[index, unit] = within[unit]
    return found, paired_size(sizes)


def _runs(
    spots: Sequence[list[Spot]], backward: Sequence[tuple[BackwardPass, ...]], spec: ProgramSpec
) -> Iterator[list[tuple[int, str]]]:
    """Yield the (index of the action, unit) of the passes whose gradients are in buffers at the same time: of a run of
    passes; without runs, one after another."""
    run: list[tuple[int, str]] = []
    for index, (own, passed) in enumerate(zip(spots, backward, strict=True)):
        buffered = [(index, unit) for at, unit in own if at is At.GRADIENTS and spec.is_buffered(unit)]
        if not spec.sums_runs:
            yield from ([one] for one in buffered)
            continue
        run += buffered
        if run and any(one.ends_run for one in passed):
            yield run
            run = []
