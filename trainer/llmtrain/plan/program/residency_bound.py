"""The fewest elements that any choice of what stays gathered has to gather. No torch in here.

Between two uses of a unit, each of its elements stays or goes. At the beginning of each use, those that stay and the
units in use fit into the memory. If parts of units may stay, the most elements stay where those whose next use is
furthest away go first, wherever the memory is exceeded: all of them are there at that point, and take no more room
before it than the others (Belady's rule; Carlisle and Lloyd 1995 for intervals). Whole units, gaps between buffers and
gathers ahead of time can only gather more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from llmtrain.plan.program.build import Programs, residency_capacity, residency_events, residency_units
from llmtrain.plan.program.instructions import At, Gather
from llmtrain.plan.program.residency import NEVER, Units, UnitUse, next_events


@dataclass(frozen=True)
class GatherGap:
    """Elements of weights that a rank gathers in a step. gathered: by its program. least: by any choice of what stays
    in the same memory."""

    gathered: int
    least: int

    @property
    def share(self) -> float:
        """The part of `least` that is gathered beyond it."""
        return self.gathered / self.least - 1 if self.least else 0.0


def gather_gap(programs: Programs) -> GatherGap:
    """Return what a rank's step gathers, and the least."""
    spec, step = programs.spec, programs.step
    events = list(residency_events(spec, spec.actions))
    units = residency_units(spec)
    gathered = sum(spec.padded[issue.unit] for issue in step.issues if isinstance(issue, Gather))
    if not spec.ordered:
        # Every unit is gathered once.
        return GatherGap(gathered, gathered)
    return GatherGap(gathered, least_gathered(events, units, max(residency_capacity(spec, events), step.weights)))


def least_gathered(events: Sequence[UnitUse], units: Units, capacity: int) -> int:
    """Return the fewest elements that are gathered for uses of units. capacity: elements of the memory."""
    sizes, following = units.sizes, next_events(events, At.USE)
    # What stays: index of the next use, negative, so that the furthest comes first. stays: elements by that index.
    furthest: list[int] = []
    stays: dict[int, int] = {}
    source: dict[str, bool] = {}
    in_memory = gathered = 0
    for event_index, event in enumerate(events):
        size = sizes[event.unit]
        if event.at is At.USE:
            source[event.unit] = event.secondary
            gathered += size - stays.get(event_index, 0)
            # Elements that stayed are counted in `in_memory` already.
            in_memory += size - stays.pop(event_index, 0)
            in_memory -= _dropped(in_memory - capacity, furthest, stays)
        else:
            in_memory -= size
            use = following[event_index]
            if use != NEVER and not (units.rounded and events[use].secondary != source[event.unit]):
                heappush(furthest, -use)
                stays[use] = size
                in_memory += size
    return gathered


def _dropped(excess: int, furthest: list[int], stays: dict[int, int]) -> int:
    """Drop up to `excess` elements of those that stay; return how many."""
    dropped = 0
    while dropped < excess and furthest:
        use = -furthest[0]
        part = min(stays.get(use, 0), excess - dropped)
        dropped += part
        if part == stays.get(use, 0):
            stays.pop(use, None)
            heappop(furthest)
        else:
            stays[use] -= part
    return dropped
