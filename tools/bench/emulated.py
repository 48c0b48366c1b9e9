"""An emulated accelerator: a computation that takes its time, a host link that takes bytes over its bandwidth each way,
a kernel that steps, and a volume that reads and writes states. The stepper, its threads and its order are those of a
run.

Everything happens at times that are computed: whoever waits sleeps until then, and whatever follows begins then, and
not when the sleeper wakes. So a busy machine disturbs only the order in which threads take up their work.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import cast

import torch
from llmtrain.comm.waits import Done, Event
from llmtrain.model.tensors import TensorSpec, UnitSpec
from llmtrain.offload.staging import BucketStep, InPlace, StepAhead
from llmtrain.offload.states import HostStates
from llmtrain.offload.stepper import Stepper, StepTicket
from llmtrain.plan.cost.offload_simulation import Computation, Order, Rates
from llmtrain.plan.offload import Bucket, bucket_slots
from llmtrain.plan.program.offload_moves import MoveEvent, Moves
from llmtrain.sharding.optimizer_shard import SeparateMasters, StepRule
from llmtrain_kernels.adamw.step import AdamWStep


@dataclass(frozen=True)
class At:
    """Stands for a CUDA event: something that happens at a time."""

    time: float

    def wait(self) -> None:
        """See Event. Whoever computes waits by its own clock."""

    def synchronize(self) -> None:
        """Sleep until then."""
        left = self.time - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def query(self) -> bool:
        """See Event."""
        return time.perf_counter() >= self.time


class EmulatedLane:
    """Does one thing after the other."""

    def __init__(self) -> None:
        self._lock, self._free = threading.Lock(), 0.0

    def take(self, ready: float, seconds: float) -> float:
        """Do something that may begin at `ready`; return when it is done, at that time."""
        done = self.start(ready, seconds)
        At(done).synchronize()
        return done

    def start(self, ready: float, seconds: float) -> float:
        """Start something that may begin at `ready`; return when it will be done."""
        with self._lock:
            self._free = max(ready, self._free) + seconds
            return self._free


@dataclass(frozen=True, kw_only=True)
class Device:
    """The lanes of an emulated device. rates: speeds of the lanes. moves: what each bucket moves. read, written: of the
    volume. known: when each bucket was given to the stepper. there: when its states are in memory. stepped: when it was
    stepped last."""

    moves: Sequence[Moves]
    rates: Rates
    down: EmulatedLane = field(default_factory=EmulatedLane)
    up: EmulatedLane = field(default_factory=EmulatedLane)
    kernel: EmulatedLane = field(default_factory=EmulatedLane)
    read: EmulatedLane = field(default_factory=EmulatedLane)
    written: EmulatedLane = field(default_factory=EmulatedLane)
    known: dict[int, float] = field(default_factory=dict)
    there: dict[int, float] = field(default_factory=dict)
    stepped: dict[int, float] = field(default_factory=dict)

    def link(self, lane: str, ready: float, nbytes: float) -> float:
        """Move bytes up or down."""
        rate = self.rates.up if lane == "up" else self.rates.down
        return (self.up if lane == "up" else self.down).take(ready, nbytes / rate)


class EmulatedFiles(HostStates):
    """States that are read from an emulated volume and written to it, through slots as those of FileStates. Really they
    are in memory. slots: when the slots' last writes end, the oldest first."""

    def __init__(self, buckets: Sequence[Bucket], device: Device, slots: int) -> None:
        super().__init__(buckets, pinned=False)
        self._device, self._clock = device, 0.0
        self._slots = deque([0.0] * slots)
        self._written = dict[int, float]()

    def fetch(self, bucket: int) -> None:
        """See StateStore. A read waits for the write of its slot, and of its bucket."""
        device, [nbytes] = self._device, self._device.moves[bucket].files
        ready = max(self._clock, self._slots.popleft(), device.known[bucket], self._written.get(bucket, 0.0))
        device.there[bucket] = device.read.start(ready, nbytes / device.rates.files[0])

    def take(self, bucket: int, ahead: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See StateStore."""
        At(self._device.there[bucket]).synchronize()
        return super().take(bucket, ahead)

    def put(self, bucket: int, ahead: bool) -> None:
        """See StateStore."""
        device, [nbytes] = self._device, self._device.moves[bucket].files
        self._clock = device.stepped[bucket]
        self._written[bucket] = device.written.start(self._clock, nbytes / device.rates.files[0])
        self._slots.append(self._written[bucket])


class EmulatedStaging:
    """Steps buckets of an emulated device, really, and takes the time that it would take. See Staging."""

    nbytes = 0

    def __init__(self, device: Device) -> None:
        self._device, self._inside, self._clock, self._published = device, InPlace(), 0.0, 0.0
        self.link = self._inside.link

    def step(self, work: BucketStep, states: torch.Tensor, numbers: AdamWStep) -> Event:
        """See Staging."""
        return self._stepped(
            work, self._device.moves[work.bucket].back, lambda: self._inside.step(work, states, numbers)
        )

    def step_ahead(
        self, ahead: StepAhead, old: torch.Tensor, new: torch.Tensor, apart: bool, numbers: AdamWStep
    ) -> None:
        """See Staging."""
        back = self._device.moves[ahead.work.bucket].back_ahead
        self._stepped(ahead.work, back, lambda: self._inside.step_ahead(ahead, old, new, apart, numbers))

    def publish(self, ahead: StepAhead) -> Event:
        """See Staging."""
        self._inside.publish(ahead)
        commit = self._device.moves[ahead.work.bucket].commit
        self._published = max(self._published, at(ahead.work))
        if commit:
            self._published = self._device.link("up", self._published, commit)
        return At(self._published)

    def _stepped(self, work: BucketStep, back_bytes: float, step: Callable[[], object]) -> "At":
        device, one = self._device, self._device.moves[work.bucket]
        there, back = ("up", "down") if one.on_device else ("down", "up")
        came = device.link(there, max(self._clock, at(work), device.there.get(work.bucket, 0.0)), one.there)
        step()
        stepped = device.stepped[work.bucket] = device.kernel.take(came, one.elements / device.rates.step)
        self._clock = device.link(back, stepped, back_bytes)
        return At(self._clock)


def at(work: BucketStep) -> float:
    """Return when a bucket may be stepped."""
    return cast(At, work.computed).time


class EmulatedRun:
    """Optimizer steps of an emulated device. moves: what each bucket moves. seconds: duration of each step; the first
    one begins without weights to wait for. happened: what happened, in order."""

    def __init__(self, moves: Sequence[Moves], computation: Computation, rates: Rates, order: Order) -> None:
        self._moves, self._computation, self._order = moves, computation, order
        units = range(len(computation.forward))
        self._of_unit = [[place for place, one in enumerate(moves) if one.unit == unit] for unit in units]
        # A few real elements of each bucket are enough to see that they are stepped.
        self._size = 1024
        spec = UnitSpec("unit", (TensorSpec(name="weight", parameter="weight", shape=(self._size,), decay=True),))
        self._rule = StepRule(spec, self._size, "cpu", SeparateMasters())
        buckets = [Bucket(f"unit {one.unit}", 0, self._size, 3, one.spare) for one in moves]
        device = Device(moves=moves, rates=rates)
        stagings = [EmulatedStaging(device) for _ in range(order.threads)]
        slots = bucket_slots(len(buckets), order.fetched)
        states = EmulatedFiles(buckets, device, slots) if rates.files else HostStates(buckets, pinned=False)
        self.stepper = Stepper(states, stagings, order.fetched)
        self._known = device.known
        self.happened = list[MoveEvent]()
        self.stepper.observe = lambda do, bucket: self.happened.append(MoveEvent(do.value, bucket))
        self._works = [self._work(place) for place in range(len(moves))]
        self._spare = torch.zeros(len(moves), self._size, dtype=torch.bfloat16)
        self._tickets: list[StepTicket] = []
        self._now = 0.0
        self.seconds = list[float]()

    def run(self, steps: int) -> None:
        """Run steps."""
        self._now = time.perf_counter()
        for number in range(1, steps + 1):
            began = self._now
            numbers = AdamWStep(step=number, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
            self.stepper.begin(numbers)
            self._passes()
            self.stepper.decide(numbers)
            self.happened.append(MoveEvent("decide", applies=True))
            self._tickets = [self.stepper.step(self._at(places, self._now), numbers) for places in self._of_unit]
            self.seconds.append(self._now - began)
        self.stepper.finish()
        self.stepper.close()

    def reduced(self, chunk: int, seconds: float) -> float:
        """Return the seconds in which a reduction goes through all buckets and they are stepped. chunk: buckets of each
        of its calls. seconds: of a call."""
        self._now = began = time.perf_counter()
        numbers = AdamWStep(step=1, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
        self.stepper.decide(numbers)
        tickets = []
        for first in range(0, len(self._moves), chunk):
            self._compute(seconds)
            tickets.append(self.stepper.step(self._at(range(first, first + chunk), self._now), numbers))
        self.stepper.finish()
        self.stepper.close()
        return max(cast(At, event).time for ticket in tickets for event in ticket.events) - began

    def _passes(self) -> None:
        """Run all passes of a step. Where one microbatch follows the other, all forward passes come first too, which
        takes as long: weights and gradients are waited for in the first forward and the last backward pass alone."""
        computation = self._computation
        for run, _ in product(computation.ranges, range(computation.microbatches)):
            for unit in run:
                self._wait(unit)
                self._compute(computation.forward[unit])
        for run, microbatch in product(reversed(computation.ranges), range(computation.microbatches)):
            for unit in reversed(run):
                self._compute(computation.backward[unit])
                if microbatch == computation.microbatches - 1:
                    self._complete(unit)

    def _wait(self, unit: int) -> None:
        """Wait for the weights of a unit."""
        together = self._order.waits_for
        for ticket in self._tickets if together is None else self._tickets[unit : unit + together]:
            self.stepper.wait_until(lambda ticket=ticket: not ticket.left)  # type: ignore[misc]
            self._now = max(self._now, *(cast(At, event).time for event in ticket.events))

    def _complete(self, unit: int) -> None:
        """Let a unit be stepped ahead, as its gradients are complete."""
        self.happened.append(MoveEvent("gradient", unit))
        spare = [place for place in self._of_unit[unit] if self._moves[place].spare]
        works = self._at(spare, self._now)
        self.stepper.step_ahead([StepAhead(work, self._spare[work.bucket]) for work in works])

    def _compute(self, seconds: float) -> None:
        self._now += seconds
        At(self._now).synchronize()

    def _at(self, places: Sequence[int], when: float) -> list[BucketStep]:
        self._known.update(dict.fromkeys(places, when))
        return [replace(self._works[place], computed=At(when)) for place in places]

    def _work(self, place: int) -> BucketStep:
        gradient = torch.full((self._size,), 1.0 + place)
        weight = torch.zeros(self._size, dtype=torch.bfloat16)
        return BucketStep(
            bucket=place, part=slice(0, self._size), last=True, within=(0, self._size), rule=self._rule,
            gradient=gradient, weight=weight, computed=Done(),
        )  # fmt: skip

    @property
    def masters(self) -> torch.Tensor:
        """The stepped masters of all buckets."""
        return torch.stack([self.stepper.states.start_read(place, 0, 0, 1)()[0] for place in range(len(self._moves))])
