"""Which units' gathered weights a rank holds at each point of a step, within a budget of memory.

A unit that is needed again stays gathered while the memory has room. Where room is needed, the unit whose next use is
furthest away goes first, which is exact for units of equal size (Belady 1966). Gathers start as early as there is room.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmtrain.plan.program.buffer_pool import BufferPool
from llmtrain.plan.program.instructions import At, Drop, Gather, Issue

NEVER = 1 << 60
"""An index after the last event."""


@dataclass(frozen=True, slots=True)
class UnitUse:
    """A use of a unit's weights begins (USE) or ends (DONE). secondary: whether the weights come from the secondary
    copy if they are gathered for this use."""

    at: At
    unit: str
    secondary: bool = False


@dataclass(frozen=True)
class Units:
    """What residency depends on. sizes: elements of each unit's buffer. rounded: whether weights from the secondary
    copy differ from those of the shards, so that a use of the one cannot take a gather of the other. filled: units
    with a secondary copy. granule: buffers begin at its multiples, which sizes are too."""

    sizes: Mapping[str, int]
    rounded: bool = False
    filled: frozenset[str] = frozenset()
    granule: int = 1


@dataclass(slots=True)
class _Gathered:
    """A unit in the buffer pool. next: index of its next use, which is the current one while `busy`. after: index of
    the first use after the current one."""

    offset: int
    secondary: bool
    next: int
    after: int
    busy: bool = False


@dataclass
class Residency:
    """Decides, event by event, what to gather and what to drop.

    events: the uses of gathered units in one step. capacity: elements of the buffer pool; it takes more only if the
    units in use at the same time need more. `issues(k)` has to be called for k = -1, the start, and then for each event
    in order.
    """

    events: Sequence[UnitUse]
    units: Units
    capacity: int
    _gathered: dict[str, _Gathered] = field(default_factory=dict)
    _filled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._pool = BufferPool(self.capacity)
        largest = max(self.units.sizes.values(), default=0)
        # Small buffers that come and go must not split the room of a large one, nor of one that stays during others.
        self._low = {unit for unit, size in self.units.sizes.items() if size == largest} | _spanning(self.events)
        self._next, self._done = next_events(self.events, At.USE), next_events(self.events, At.DONE)
        self._uses = [event_index for event_index, event in enumerate(self.events) if event.at is At.USE]
        self._ahead = 0

    @property
    def high(self) -> int:
        """Elements of the buffer pool."""
        return self._pool.high

    def issues(self, event_index: int) -> list[Issue]:
        """Return what is issued at event `event_index`."""
        found: list[Issue] = []
        if event_index >= 0:
            event = self.events[event_index]
            if event.at is At.USE:
                self._begin(event_index, found)
            else:
                self._end(event_index, found)
        self._look_ahead(event_index, found)
        return found

    def _begin(self, event_index: int, found: list[Issue]) -> None:
        event = self.events[event_index]
        if not self._holds(event):
            if event.unit in self._gathered:
                self._drop(event.unit, found)
            idle = [(one.next, name) for name, one in self._gathered.items() if not one.busy]
            while idle and not self._pool.fits(self.units.sizes[event.unit]):
                idle.remove(furthest := max(idle))
                self._drop(furthest[1], found)
            self._gather(event_index, found)
        gathered = self._gathered[event.unit]
        gathered.busy, gathered.after = True, self._next[gathered.next]

    def _end(self, event_index: int, found: list[Issue]) -> None:
        unit = self.events[event_index].unit
        gathered = self._gathered[unit]
        gathered.busy, gathered.next, gathered.after = False, self._next[event_index], self._next[event_index]
        if gathered.next == NEVER or not self._holds(self.events[gathered.next]):
            self._drop(unit, found)

    def _look_ahead(self, event_index: int, found: list[Issue]) -> None:
        """Gather the next units for which there is room."""
        while self._ahead < len(self._uses):
            use = self._uses[self._ahead]
            if use > event_index and not self._holds(self.events[use]):
                # The unit's present weights are of the other kind, and still needed.
                if self.events[use].unit in self._gathered or not self._make_room(use, found):
                    return
                self._gather(use, found)
            self._ahead += 1

    def _make_room(self, use: int, found: list[Issue]) -> bool:
        """Make room for a use to come by dropping units that are used later. Return whether there is room."""
        size, done = self.units.sizes[self.events[use].unit], self._done
        while not self._pool.fits(size):
            # A unit that is in use until then keeps its room.
            later = [(one.after, name) for name, one in self._gathered.items() if not one.busy or done[one.next] < use]
            furthest, name = max(later, default=(0, ""))
            if furthest <= use:
                return False
            if self._gathered[name].busy:
                # Its room is free in time, and no other unit has to go.
                return False
            self._drop(name, found)
        return True

    def _gather(self, use: int, found: list[Issue]) -> None:
        event = self.events[use]
        offset = self._pool.take(self.units.sizes[event.unit], event.unit in self._low)
        fills = not event.secondary and event.unit in self.units.filled - self._filled
        if fills:
            self._filled.add(event.unit)
        self._gathered[event.unit] = _Gathered(offset, event.secondary, use, use)
        found.append(Gather(event.unit, offset, event.secondary, fills))

    def _drop(self, unit: str, found: list[Issue]) -> None:
        self._pool.give_back(self._gathered.pop(unit).offset)
        found.append(Drop(unit))

    def _holds(self, event: UnitUse) -> bool:
        """Whether the buffer pool has the weights that an event uses."""
        gathered = self._gathered.get(event.unit)
        return gathered is not None and (not self.units.rounded or gathered.secondary == event.secondary)


def reside(events: Sequence[UnitUse], units: Units, capacity: int) -> tuple[list[list[Issue]], int]:
    """Return what is issued at the start and at each event, and the elements of the buffer pool.

    Units of different sizes may leave gaps that are too small for the units in use at the same time. Then less is
    gathered ahead, so that the buffer pool has `capacity` elements at most, if the units in use at the same time allow
    it.
    """
    # The last of them is 0.
    for elements in dict.fromkeys(
        capacity * eighths // 8 // units.granule * units.granule for eighths in range(8, -1, -1)
    ):
        residency, issues = Residency(events, units, elements), list[list[Issue]]()
        for event_index in range(-1, len(events)):
            issues.append(residency.issues(event_index))
            if residency.high > capacity and elements:
                break
        if residency.high <= capacity:
            break
    return issues, residency.high


def lookahead_capacity(events: Sequence[UnitUse], sizes: Mapping[str, int], ahead: int = 2) -> int:
    """Return the elements of the units in use and of the next `ahead` others, at the use where these are most."""
    busy: set[str] = set()
    most = 0
    for event_index, event in enumerate(events):
        if event.at is At.DONE:
            busy.discard(event.unit)
            continue
        busy.add(event.unit)
        needed = busy | _next_units(events, event_index, busy, min(ahead, len(sizes) - len(busy)))
        most = max(most, sum(sizes[unit] for unit in needed))
    return most


def _spanning(events: Sequence[UnitUse]) -> set[str]:
    """Return the units that are in use while the use of another one begins."""
    busy: set[str] = set()
    found: set[str] = set()
    for event in events:
        if event.at is At.USE:
            found |= busy
            busy.add(event.unit)
        else:
            busy.discard(event.unit)
    return found


def _next_units(events: Sequence[UnitUse], event_index: int, busy: set[str], ahead: int) -> set[str]:
    """Return the next `ahead` units, of those that are not busy, that are used after an event."""
    found: set[str] = set()
    for later in range(event_index + 1, len(events)):
        if len(found) == ahead:
            break
        if events[later].at is At.USE and events[later].unit not in busy:
            found.add(events[later].unit)
    return found


def next_events(events: Sequence[UnitUse], at: At) -> list[int]:
    """Return, for each event, the index of the next event of its unit that is `at`, or NEVER."""
    later: dict[str, int] = {}
    found = [NEVER] * len(events)
    for event_index in reversed(range(len(events))):
        found[event_index] = later.get(events[event_index].unit, NEVER)
        if events[event_index].at is at:
            later[events[event_index].unit] = event_index
    return found
