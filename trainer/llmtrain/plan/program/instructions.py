"""The instructions of a step's program, as pure data. No torch in here."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from llmtrain.plan.per_rank.replica_groups import ReplicaGroup
from llmtrain.plan.pipeline.actions import Action


class At(Enum):
    """A named point of a computation. USE: it begins to need the weights of a unit. DONE: it no longer needs them.
    GRADIENTS: it has computed all gradients of a unit for this pass."""

    USE = "use"
    DONE = "done"
    GRADIENTS = "gradients"


@dataclass(frozen=True, slots=True)
class Gather:
    """Gather a unit's weights. offset: first element of its buffer in the pool. secondary: from the secondary copy.
    fills: whether this fills the secondary copy."""

    unit: str
    offset: int
    secondary: bool = False
    fills: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """Give back the buffer of a unit's gathered weights."""

    unit: str


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce a unit's gradients over the ranks that share it.

    offset: first element of the buffer, in the buffer pool of gradients, that holds the gradients of this pass, or the
    sum of a run of passes; None if they are summed in the unit's own gradient. first, last: whether these passes
    include the unit's first or last one of the step. partial: elements of TP-replicated gradients that are summed over
    the tensor-parallel ranks before, as each of them has computed a part (sequence parallelism).
    """

    unit: str
    offset: int | None
    first: bool
    last: bool
    partial: int = 0


Issue = Gather | Drop | Reduce


@dataclass(frozen=True, slots=True)
class ReplicaSum:
    """A sum, after the last pass, over ranks that hold the same parameters.

    group: partial (of a unit that is not reduced), stage (for the TP-replicated gradients of all units) or tied; see
    `llmtrain.plan.per_rank.replica_groups`. unit: empty for all units. elements: that are summed.
    """

    group: ReplicaGroup
    unit: str
    elements: int


@dataclass(frozen=True, slots=True)
class Point:
    """A named point, and what a rank issues there, in this order. At USE, it then waits for the unit's
    weights."""

    at: At
    unit: str
    issues: tuple[Issue, ...] = ()

    def __str__(self) -> str:
        return f"{self.at.value} {self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardPass:
    """One backward pass through a unit.

    first, last: whether it is the unit's first or last of the step: the first overwrites the sum of gradients, the last
    completes it. leading: whether it uses only the unit's first parameter. begins_run, ends_run: whether it is the
    first or the last of a run of passes whose gradients are summed in one buffer before they are reduced. offset: of
    this buffer, see Reduce.
    """

    unit: str
    first: bool
    last: bool
    leading: bool = False
    begins_run: bool = True
    ends_run: bool = True
    offset: int | None = None


class Pass(NamedTuple):
    """A computation of one microbatch through one stage. points: in order. backward: the units whose gradients it
    computes."""

    action: Action
    points: tuple[Point, ...]
    backward: tuple[BackwardPass, ...] = ()

    @property
    def reduces(self) -> Mapping[str, Reduce]:
        """The reductions of this pass, by unit."""
        issues = (issue for point in self.points for issue in point.issues)
        return {issue.unit: issue for issue in issues if isinstance(issue, Reduce)}


@dataclass(frozen=True, kw_only=True)
class Program:
    """The passes of one optimizer step, or of an evaluation, of one rank.

    start: what is issued before the first pass. passes: in order; with message-driven, arriving messages decide the
    order of forward and backward passes, and only messages depend on it. weights, gradients: elements of the buffer
    pools of gathered weights and of unsharded gradients. finish: sums over replicas after the passes, in order.
    """

    start: tuple[Issue, ...]
    passes: tuple[Pass, ...]
    weights: int
    gradients: int
    finish: tuple[ReplicaSum, ...] = ()

    @property
    def issues(self) -> Iterator[Issue]:
        """Everything that is issued, in order."""
        yield from self.start
        yield from (issue for one in self.passes for point in one.points for issue in point.issues)

    @cached_property
    def issue_counts(self) -> Sequence[tuple[Gather | Reduce, int]]:
        """The gathers and reductions: one of each kind that sends the same, and how many there are."""
        # Passes of periods that repeat share their points.
        of_passes = [one.points for one in self.passes]
        times = Counter(map(id, of_passes))
        distinct = dict(zip(map(id, of_passes), of_passes, strict=True))
        counted = [(issue, 1) for issue in self.start]
        counted += [(issue, times[key]) for key, points in distinct.items() for one in points for issue in one.issues]
        first: dict[Hashable, Gather | Reduce] = {}
        count = Counter[Hashable]()
        for issue, often in counted:
            if isinstance(issue, Gather):
                same: Hashable = issue.unit, issue.secondary
            elif isinstance(issue, Reduce):
                same = issue.unit, issue.offset is None, issue.last
            else:
                continue
            first.setdefault(same, issue)
            count[same] += often
        return [(issue, count[same]) for same, issue in first.items()]

    @cached_property
    def by_action(self) -> Mapping[Action, Pass]:
        """The passes by action."""
        return {one.action: one for one in self.passes}
