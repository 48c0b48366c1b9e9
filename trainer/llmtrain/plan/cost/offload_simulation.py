"""How long a step takes in which offloaded states are stepped in parallel with the computation: a simulation of its
lanes. No torch in here.

Each lane does one thing at a time, in the order in which it is asked: the computation, the host link each way, the
kernel that steps, and reads and writes of files. The queue of buckets is that of `plan.program.offload_moves`.
"""

import heapq
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, pairwise, product
from math import inf

from llmtrain.plan.program.offload_moves import MoveEvent, Moves

# A process yields the time at which it continues, or a condition.
_Process = Generator[float | Callable[[], bool], None, None]


@dataclass(frozen=True)
class Computation:
    """The computation of a step. forward, backward: seconds of one microbatch in each unit, in the order of the forward
    pass. microbatches: their number in a step. runs: numbers of units that all microbatches pass before the next ones;
    none if each microbatch passes all units before the next microbatch."""

    forward: Sequence[float]
    backward: Sequence[float]
    microbatches: int = 1
    runs: Sequence[int] = ()

    @property
    def ranges(self) -> list[range]:
        """The units of each run. Microbatches that pass all units one after another take as long as one run."""
        ends = list(accumulate(self.runs or (len(self.forward),)))
        return [range(start, end) for start, end in pairwise([0, *ends])]

    @property
    def seconds(self) -> float:
        """Seconds of a step's computation alone."""
        return self.microbatches * (sum(self.forward) + sum(self.backward))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """down, up: bytes per second from and to the device. step: elements per second. files: bytes per second in each
    direction, of each volume."""

    down: float = inf
    up: float = inf
    step: float = inf
    files: Sequence[float] = ()


@dataclass(frozen=True)
class Order:
    """What may overlap. threads: buckets that are under way at the same time. waits_for: units whose buckets a unit's
    forward pass waits for, its own and those of the units after it; None: it waits for all. fetched: buckets of files
    that are read while one is stepped."""

    threads: int
    waits_for: int | None = 1
    fetched: int = 0


@dataclass(frozen=True)
class SimulatedSteps:
    """seconds: duration of a step, in the steady state. events: the moves of all simulated steps."""

    seconds: float
    events: Sequence[MoveEvent]


def least_seconds(moves: Sequence[Moves], computation: Computation, rates: Rates) -> dict[str, float]:
    """Return the seconds that each lane is busy in a step. No step is shorter than the largest."""
    return {
        "compute": computation.seconds,
        "down": sum(one.down for one in moves) / rates.down,
        "up": sum(one.up for one in moves) / rates.up,
        "step": sum(one.elements for one in moves) / rates.step,
        **{
            f"volume {volume}": sum(one.files[volume] for one in moves) / rate
            for volume, rate in enumerate(rates.files)
        },
    }


def exact_least(moves: Sequence[Moves], computation: Computation, rates: Rates) -> float:
    """Return the least seconds of a step that is exact.

    The first gradients are complete in the last backward pass of the last run of units, and its first forward pass
    needs the last weights: the other lanes do not run beside its other passes. Weights that wait on the host are copied
    to the device once the norm is known, during the forward passes.
    """
    busy, last = least_seconds(moves, computation, rates), computation.ranges[-1]
    alone, others = busy.pop("compute"), computation.microbatches - 1
    forward, backward = (
        others * sum(times[unit] for unit in last) for times in (computation.forward, computation.backward)
    )
    beside, gradients = alone - forward - backward, computation.microbatches * sum(computation.backward) - backward
    weights = sum(one.commit for one in moves) / rates.up
    return forward + backward + max(beside, gradients + weights, *busy.values())


def simulate_steps(
    moves: Sequence[Moves], computation: Computation, rates: Rates, order: Order, steps: int = 6
) -> SimulatedSteps:
    """Simulate steps that do not clip, and return the time of the last one."""
    simulated = _Simulation(moves, computation, rates, order)
    ends = simulated.run(steps)
    return SimulatedSteps(ends[-1] - ends[-2], simulated.events)


@dataclass
class _FreeTimes:
    """When each lane is free."""

    free: dict[str, float] = field(default_factory=dict)

    def take(self, lane: str, now: float, seconds: float) -> float:
        """Return when a lane is done with something that may begin now."""
        self.free[lane] = max(now, self.free.get(lane, 0.0)) + seconds
        return self.free[lane]


class _Simulation:
    def __init__(self, moves: Sequence[Moves], computation: Computation, rates: Rates, order: Order) -> None:
        self._moves, self._computation, self._rates, self._order = moves, computation, rates, order
        self._units = range(len(computation.forward))
        self._of_unit = [[bucket for bucket, one in enumerate(moves) if one.unit == unit] for unit in self._units]
        self._lanes, self._now, self.events = _FreeTimes(), 0.0, list[MoveEvent]()
        self._ahead: list[deque[int]] = []
        self._final, self._commits = deque[int](), deque[int]()
        self._stepped_ahead: dict[int, bool] = {}
        self._left = [0] * len(computation.forward)
        self._ends: list[float] = []
        self._done = False

    def run(self, steps: int) -> list[float]:
        """Return when the computation of each step ends."""
        numbers, later = count(), list[tuple[float, int, _Process]]()
        waiting: list[tuple[Callable[[], bool], _Process]] = []
        ready = deque([self._compute(steps), self._publish(), *(self._thread() for _ in range(self._order.threads))])
        while not self._done:
            while ready:
                process = ready.popleft()
                wanted = next(process, None)
                if callable(wanted):
                    waiting.append((wanted, process))
                elif wanted is not None:
                    heapq.heappush(later, (wanted, next(numbers), process))
                blocked, waiting = waiting, []
                for reached, one in blocked:
                    if reached():
                        ready.append(one)
                    else:
                        waiting.append((reached, one))
            if later:
                self._now, _, process = heapq.heappop(later)
                ready.append(process)
        return self._ends

    def _compute(self, steps: int) -> _Process:
        computation, together = self._computation, self._order.waits_for
        for _ in range(steps):
            for run, _ in product(computation.ranges, range(computation.microbatches)):
                for unit in run:
                    waited = self._units if together is None else self._units[unit : unit + together]
                    yield lambda waited=waited: not any(self._left[one] for one in waited)  # type: ignore[misc]
                    yield self._now + computation.forward[unit]
            for run, microbatch in product(reversed(computation.ranges), range(computation.microbatches)):
                for unit in reversed(run):
                    yield self._now + computation.backward[unit]
                    if microbatch == computation.microbatches - 1:
                        self._complete(unit)
            self._decide()
            self._ends.append(self._now)
        yield lambda: not any(self._left)
        self._done = True

    def _complete(self, unit: int) -> None:
        self.events.append(MoveEvent("gradient", unit))
        spare = [bucket for bucket in self._of_unit[unit] if self._moves[bucket].spare]
        if spare:
            self._ahead.append(deque(spare))

    def _decide(self) -> None:
        self.events.append(MoveEvent("decide", applies=True))
        self._ahead.clear()
        for unit, buckets in enumerate(self._of_unit):
            self._left[unit] = len(buckets)
            for bucket in buckets:
                (self._commits if bucket in self._stepped_ahead else self._final).append(bucket)

    def _next(self) -> tuple[str, int]:
        if self._final:
            return "step", self._final.popleft()
        bucket = self._ahead[-1].popleft()
        if not self._ahead[-1]:
            self._ahead.pop()
        self._stepped_ahead[bucket] = False
        return "ahead", bucket

    def _thread(self) -> _Process:
        entered = deque[tuple[str, int, float]]()
        while True:
            # Another thread may be faster.
            while not (entered or self._final or self._ahead):
                yield lambda: bool(self._final or self._ahead)
            while len(entered) <= self._order.fetched and (self._final or self._ahead):
                do, bucket = self._next()
                entered.append((do, bucket, self._files("read", bucket)))
                self._note(do, bucket)
            do, bucket, read = entered.popleft()
            # It may have been read long ago.
            yield max(read, self._now)
            yield from self._bucket(do, bucket)

    def _publish(self) -> _Process:
        while True:
            yield lambda: bool(self._commits)
            bucket = self._commits.popleft()
            yield lambda bucket=bucket: self._stepped_ahead[bucket]  # type: ignore[misc]
            self._note("commit", bucket)
            if commit := self._moves[bucket].commit:
                yield self._lanes.take("up", self._now, commit / self._rates.up)
            del self._stepped_ahead[bucket]
            self._left[self._moves[bucket].unit] -= 1

    def _bucket(self, do: str, bucket: int) -> _Process:
        moves, rates = self._moves[bucket], self._rates
        there, back = ("up", "down") if moves.on_device else ("down", "up")
        rate = {"up": rates.up, "down": rates.down}
        yield self._lanes.take(there, self._now, moves.there / rate[there])
        yield self._lanes.take("step", self._now, moves.elements / rates.step)
        self._files("write", bucket)
        yield self._lanes.take(back, self._now, (moves.back_ahead if do == "ahead" else moves.back) / rate[back])
        if do == "ahead":
            self._stepped_ahead[bucket] = True
        else:
            self._left[moves.unit] -= 1

    def _files(self, way: str, bucket: int) -> float:
        """Return when all volumes have read or written their parts of a bucket."""
        parts = enumerate(zip(self._moves[bucket].files, self._rates.files, strict=True))
        ends = (self._lanes.take(f"{way} {volume}", self._now, count / rate) for volume, (count, rate) in parts)
        return max(ends, default=self._now)

    def _note(self, do: str, bucket: int) -> None:
        self.events.append(MoveEvent("ahead" if do == "ahead" else "step" if do == "step" else "commit", bucket))
