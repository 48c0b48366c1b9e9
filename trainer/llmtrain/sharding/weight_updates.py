"""The update of all weight shards after an optimizer step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmtrain.comm.stream import Job
from llmtrain.comm.waits import AllOf, Done, Ticket
from llmtrain.comm.workspace import Workspace
from llmtrain.plan.cost.optimizer_traffic import UPDATED_TOGETHER
from llmtrain.plan.traffic import CountTraffic, Traffic, gather_traffic
from llmtrain.sharding.collectives import HopStep, Packing, all_gather
from llmtrain.sharding.in_flight import InFlight
from llmtrain.sharding.offloaded_weights import OffloadedWeights
from llmtrain.sharding.packed_collectives import all_gather_packed
from llmtrain.sharding.replicated import ReplicatedParameters
from llmtrain.sharding.unit import ShardedUnit


@dataclass(frozen=True)
class UpdatePart:
    """A part of a unit's update. steps: those of it, which follow those of the part before. traffic: their
    collectives. before: returns a job before the first step of the first part; None if there is none."""

    steps: Callable[[Workspace], list[HopStep]]
    traffic: Callable[[], list[Traffic]]
    before: Callable[[], Job] | None = None


def gather_part(unit: ShardedUnit, packing: Packing | None) -> UpdatePart:
    """Return what gathers weights, as they were rounded when they were stepped, or packed from these."""
    hops = unit.hops.gather(unit.degrees.weights, unit.degrees.optimizer)

    def steps(workspace: Workspace) -> list[HopStep]:
        if packing is None:
            return all_gather(unit.weight, hops)
        return all_gather_packed(unit.weight, unit.owned_weight, hops, packing, workspace)

    return UpdatePart(steps, lambda: gather_traffic("update", hops, unit.weight.numel(), unit.weight.itemsize, packing))


def replicas_part(unit: ShardedUnit, replicated: ReplicatedParameters) -> UpdatePart:
    """Return what updates TP-replicated parameters, which must not be packed."""
    hops = unit.hops.gather(1, unit.degrees.optimizer)
    return UpdatePart(lambda workspace: replicated.steps(hops), lambda: replicated.traffic(hops), replicated.taking)


def store_part(unit: ShardedUnit, offloaded: OffloadedWeights) -> UpdatePart:
    """Return what stores the weights that the device has where their shard rests."""

    def steps(workspace: Workspace) -> list[HopStep]:
        weight = unit.weight
        return [HopStep(offloaded.writes, lambda: offloaded.store.store(unit.spec.name, weight))]

    return UpdatePart(steps, list)


class Update(Protocol):
    """The update of one unit. late: whether it starts just before the unit is needed, where the unit is still being
    stepped."""

    late: bool

    def start(self, stepped: Ticket) -> Ticket:
        """Start it; return its ticket. stepped: of the unit's step. Collective."""


class StepAlone:
    """The update of a unit whose step writes all of its weights on this rank. See Update."""

    late = False

    def start(self, stepped: Ticket) -> Ticket:
        """See Update."""
        return stepped


@dataclass(frozen=True)
class Sending:
    """How updates are sent. packing: None to send weights as they are. replicated: by unit, the parameters that
    tensor-parallel ranks share and that must not be packed. in_flight: starts the steps. count: called with their
    collectives."""

    packing: Packing | None
    replicated: Mapping[str, ReplicatedParameters]
    in_flight: InFlight
    count: CountTraffic


class WeightUpdate:
    """Sends what a step has written. See Update."""

    def __init__(self, parts: Sequence[UpdatePart], late: bool, sending: Sending) -> None:
        self.late, self._parts, self._sending = late, parts, sending

    def start(self, stepped: Ticket) -> Ticket:
        """See Update."""
        return self._send(stepped)

    def _send(self, after: Ticket) -> Ticket:
        """Start the steps behind a ticket."""

        def steps(workspace: Workspace) -> list[HopStep]:
            first, *rest = [step for part in self._parts for step in part.steps(workspace)]
            for job in [part.before() for part in self._parts if part.before is not None]:
                first = first.first(job)
            return [first.first(after.wait), *rest]

        for part in self._parts:
            self._sending.count(part.traffic())
        return self._sending.in_flight.start(steps)[-1]


class UpdateAtRest(WeightUpdate):
    """Sends what the device has stepped; the host steps the rest, and writes it where it rests. See Update."""

    def start(self, stepped: Ticket) -> Ticket:
        """See Update."""
        return AllOf([stepped, self._send(Done())])


def new_update(unit: ShardedUnit, sending: Sending, stores: Sequence[UpdatePart] = ()) -> Update:
    """Return the update of a unit. stores: what stores its weights after they are sent, if anything."""
    packing, replicated = sending.packing, sending.replicated
    parts: list[UpdatePart] = []
    if unit.hops.gather(unit.degrees.weights, unit.degrees.optimizer):
        parts.append(gather_part(unit, packing))
    if unit.spec.name in replicated:
        parts.append(replicas_part(unit, replicated[unit.spec.name]))
    # Offloaded weights take memory that the next pass needs, so their stores start immediately.
    late = bool(parts) and not unit.hops.placement.moves_weights
    parts += stores
    if not parts:
        return StepAlone()
    # What tensor-parallel ranks share is read where the step has written it.
    waits = unit.at_rest is None or unit.spec.name in replicated
    return WeightUpdate(parts, late, sending) if waits else UpdateAtRest(parts, late, sending)


class WeightUpdates:
    """Updates each unit's weight shards on all ranks once the unit is stepped.

    What is sent must be stepped when its gather starts, and a GPU's gathers are started by the thread that computes. So
    the gather of a unit that is still being stepped starts just before the unit is needed, one unit ahead.
    """

    def __init__(self, updates: Mapping[str, Update]) -> None:
        """updates: by unit."""
        self._updates = updates
        self._tickets: dict[str, Ticket] = {}
        # The number of each unit in the order of updates, which is the same on all ranks; and the tickets of steps of
        # units whose update has not begun.
        self._order: dict[str, int] = {}
        self._later: dict[str, Ticket] = {}

    def start(self, name: str, stepped: Ticket | None = None) -> None:
        """Start the update of a unit whose masters were stepped and published. stepped: a ticket of that; None if it is
        done. Collective. Units come in the order in which they are needed next."""
        self._order.setdefault(name, len(self._order))
        if stepped is not None and self._updates[name].late:
            self._later[name] = stepped
        else:
            self._tickets[name] = self._updates[name].start(Done() if stepped is None else stepped)

    def take(self, name: str) -> Ticket:
        """Return the ticket of a unit's pending update, which the caller waits for. Collective."""
        for one in [one for one in self._later if self._order[one] < self._order[name] + UPDATED_TOGETHER]:
            self._later.pop(one).wait()
            self._tickets[one] = self._updates[one].start(Done())
        return self._tickets.pop(name, Done())

    def wait(self, name: str) -> None:
        """Wait for a unit's update before the next computation. Collective."""
        self.take(name).wait()

    def finish(self) -> None:
        """Wait for all updates. Collective."""
        for name in [*self._later, *self._tickets]:
            self.wait(name)
