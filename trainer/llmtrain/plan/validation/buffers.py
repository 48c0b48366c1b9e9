"""Whether a rank has the weights that it uses, and whether its buffers lie in their buffer pools without overlapping.

No torch in here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from llmtrain.plan.pipeline.actions import Action
from llmtrain.plan.program.build import serves_secondary
from llmtrain.plan.program.instructions import At, Drop, Gather, Issue, Program, Reduce
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.plan.validation.places import ProgramPlace, program_issues, ranges_overlap


def weight_problems(spec: ProgramSpec, program: Program) -> Iterator[str]:
    """Yield the problems of a program's gathered weights."""
    if 0 < spec.resident < program.weights:
        yield (
            f"the pool of gathered weights has {program.weights} elements, above the budget of {spec.resident} "
            "(zero.resident)"
        )
    following = _Weights(spec, program.weights)
    for issue in program.start:
        yield from following.issue(ProgramPlace(), issue)
    for one in program.passes:
        for point in one.points:
            place = ProgramPlace(one.action, point)
            if point.at is At.DONE:
                yield from following.done(place, point.unit)
            for issue in point.issues:
                yield from following.issue(place, issue)
            if point.at is At.USE:
                yield from following.use(place, one.action, point.unit)
    yield from following.end()


def gradient_problems(spec: ProgramSpec, program: Program) -> Iterator[str]:
    """Yield the problems of the buffers that hold unsharded gradients before their reduction."""
    if spec.sums_runs:
        yield from _run_problems(spec, program)
    before: tuple[str, tuple[int, int]] | None = None
    for place, issue in program_issues(program):
        if not isinstance(issue, Reduce) or issue.offset is None or issue.unit not in spec.padded:
            continue
        range_ = issue.offset, issue.offset + spec.padded[issue.unit]
        if range_[0] < 0 or range_[1] > program.gradients:
            yield (
                f"{place}: the gradients of {issue.unit} take {_text(range_)}, outside of their pool of "
                f"{program.gradients} elements"
            )
        if before is not None and not spec.sums_runs and ranges_overlap(range_, before[1]):
            yield (
                f"{place}: the gradients of {issue.unit} take {_text(range_)}, which overlap those of {before[0]} "
                f"({_text(before[1])}), the reduction right before"
            )
        before = issue.unit, range_


def _run_problems(spec: ProgramSpec, program: Program) -> Iterator[str]:
    """Yield the problems of buffers that hold sums over runs of passes: those of a run lie beside each other, and
    beside those that the run before reduced last."""
    reducing, offsets = dict[str, int](), dict[str, int]()
    for one in program.passes:
        place, buffered = ProgramPlace(one.action), [passed for passed in one.backward if passed.offset is not None]
        for passed in buffered:
            if passed.unit in offsets and offsets[passed.unit] != passed.offset:
                yield f"{place}: the gradients of {passed.unit} are not added to those of its pass before"
        offsets |= {passed.unit: passed.offset for passed in buffered if passed.offset is not None}
        taken = {**reducing, **offsets}
        for unit in (passed.unit for passed in buffered if passed.begins_run):
            for other in taken:
                ranges = [(taken[name], taken[name] + spec.padded[name]) for name in (unit, other)]
                if unit != other and ranges_overlap(*ranges):
                    yield f"{place}: the gradients of {unit} take {_text(ranges[0])}, which overlap those of {other}"
        for unit, issue in one.reduces.items():
            if issue.offset is not None and issue.offset != offsets.get(unit):
                yield f"{place}: the reduction of {unit} is not of the buffer that has its gradients"
        if one.reduces and offsets:
            reducing, offsets = offsets, {}


@dataclass
class _Weights:
    """The gathered weights at a place of a program. elements: size of the buffer pool. gathered: by unit, its last
    gather and where it was issued. busy: units in use. used: units that were used before. filled: units whose secondary
    copy is filled."""

    spec: ProgramSpec
    elements: int
    gathered: dict[str, tuple[Gather, ProgramPlace]] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)

    def issue(self, place: ProgramPlace, issue: Issue) -> Iterator[str]:
        """Follow an instruction."""
        if isinstance(issue, Reduce):
            return
        if issue.unit not in self.spec.padded:
            yield f"{place}: the rank does not hold {issue.unit}"
        elif not self.spec.is_gathered(issue.unit):
            yield f"{place}: the rank holds all weights of {issue.unit}, which need no gather and no drop"
        elif isinstance(issue, Gather):
            yield from self._gather(place, issue)
        else:
            yield from self._drop(place, issue)

    def use(self, place: ProgramPlace, action: Action, unit: str) -> Iterator[str]:
        """Begin a use of a unit, after what is issued there."""
        if unit in self.busy:
            yield f"{place}: {unit} is in use already"
        self.busy.add(unit)
        if unit not in self.gathered:
            yield f"{place}: {unit} is used, but it is not gathered"
        elif self.spec.rounded and unit in self.spec.degrees:
            expected = unit in self.used and serves_secondary(self.spec, unit, action.kind)
            gather, origin = self.gathered[unit]
            if gather.secondary != expected:
                yield (
                    f"{place}: {unit} is used as gathered from {_source(gather.secondary)} ({origin}), but this use "
                    f"needs those of {_source(expected)}, which differ by rounding"
                )

    def done(self, place: ProgramPlace, unit: str) -> Iterator[str]:
        """End a use of a unit, before what is issued there."""
        if unit not in self.busy:
            yield f"{place}: {unit} is not in use"
        self.busy.discard(unit)
        self.used.add(unit)

    def end(self) -> Iterator[str]:
        """Follow the end of the program."""
        for unit, (_, origin) in self.gathered.items():
            yield f"{origin}: {unit} is gathered here, and still gathered at the end of the program"
        for unit in sorted(self.busy):
            yield f"{unit} is still in use at the end of the program"

    def _gather(self, place: ProgramPlace, gather: Gather) -> Iterator[str]:
        unit, own = gather.unit, self._range(gather)
        if unit in self.gathered:
            yield f"{place}: {unit} is gathered already, since {self.gathered[unit][1]}"
        if own[0] < 0 or own[1] > self.elements:
            yield (f"{place}: the buffer of {unit} takes {_text(own)}, outside of the pool of {self.elements} elements")
        for other, (other_gather, _) in self.gathered.items():
            if other != unit and ranges_overlap(own, self._range(other_gather)):
                yield (
                    f"{place}: the buffer of {unit} takes {_text(own)}, which overlap that of {other} "
                    f"({_text(self._range(other_gather))})"
                )
        yield from self._secondary(place, gather)
        self.gathered[unit] = gather, place

    def _secondary(self, place: ProgramPlace, gather: Gather) -> Iterator[str]:
        unit = gather.unit
        if not self.spec.degrees[unit].secondary:
            if gather.secondary or gather.fills:
                yield f"{place}: {unit} has no secondary copy"
            return
        if gather.secondary and unit not in self.filled:
            yield f"{place}: {unit} is gathered from its secondary copy before that is filled"
        if gather.fills and gather.secondary:
            yield f"{place}: a gather of {unit} from its secondary copy fills the secondary copy"
        if gather.fills and unit in self.filled:
            yield f"{place}: the secondary copy of {unit} is filled a second time"
        if gather.fills:
            self.filled.add(unit)

    def _drop(self, place: ProgramPlace, drop: Drop) -> Iterator[str]:
        if drop.unit in self.busy:
            yield f"{place}: {drop.unit} is dropped while it is in use"
        if self.gathered.pop(drop.unit, None) is None:
            yield f"{place}: {drop.unit} is dropped, but it is not gathered"

    def _range(self, gather: Gather) -> tuple[int, int]:
        return gather.offset, gather.offset + self.spec.padded[gather.unit]


def _text(range_: tuple[int, int]) -> str:
    return f"elements {range_[0]} to {range_[1]}"


def _source(secondary: bool) -> str:
    return "the secondary copy" if secondary else "the weight shards"
