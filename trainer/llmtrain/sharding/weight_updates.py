"""The update of all weight shards from the masters after an optimizer step."""

from collections.abc import Mapping

from llmtrain.comm.device import stays_for_stream
from llmtrain.comm.stream import JoinedTicket, Ticket
from llmtrain.comm.workspace import Workspace
from llmtrain.plan.optimizer_traffic import UPDATED_TOGETHER
from llmtrain.plan.traffic import Count, gather_traffic
from llmtrain.sharding.collectives import HopStep, Packing, all_gather
from llmtrain.sharding.hops import Hop
from llmtrain.sharding.in_flight import InFlight
from llmtrain.sharding.offloaded_weights import OffloadedWeights
from llmtrain.sharding.packed_collectives import all_gather_packed
from llmtrain.sharding.replicated import ReplicatedParameters
from llmtrain.sharding.unit import ShardedUnit


class WeightUpdates:
    """Gathers each unit's stepped weights into every rank's weight shard: rounded already, or packed from the masters.

    What is sent must be stepped when its gather starts, and a GPU's gathers are started by the thread that computes. So
    the gather of a unit that is still being stepped starts just before the unit is needed, one unit ahead.

    replicated: by unit, the parameters that tensor-parallel ranks share and that must not be packed. offloaded: where
    weight shards go after that; None where they stay.
    """

    def __init__(
        self, packing: Packing | None, replicated: Mapping[str, ReplicatedParameters],
        offloaded: OffloadedWeights | None, in_flight: InFlight, count: Count,
    ) -> None:  # fmt: skip
        self._packing, self._replicated, self._offloaded = packing, replicated, offloaded
        self._in_flight, self._count = in_flight, count
        self._tickets: dict[str, Ticket] = {}
        # The number of each unit in the order of updates, which is the same on all ranks; and the units whose update
        # has not begun.
        self._places: dict[str, int] = {}
        self._later: dict[str, tuple[ShardedUnit, Ticket]] = {}

    def start(self, unit: ShardedUnit, stepped: Ticket | None = None) -> None:
        """Start the update of a unit whose masters were stepped and published. stepped: a ticket of that; None if it is
        done. Collective. Units come in the order in which they are needed next."""
        name = unit.spec.name
        self._places.setdefault(name, len(self._places))
        hops = unit.hops.gather(unit.degrees.weights, unit.degrees.optimizer)
        # Offloaded weights take memory that the next pass needs, so their stores start immediately.
        waits = (hops or name in self._replicated) and not unit.hops.placement.moves_weights
        if stepped is not None and waits:
            self._later[name] = unit, stepped
        else:
            self._begin(unit, stepped)

    def _begin(self, unit: ShardedUnit, stepped: Ticket | None = None) -> None:
        packing, replicated, offloaded = self._packing, self._replicated.get(unit.spec.name), self._offloaded
        hops, all_hops = (unit.hops.gather(inner, unit.degrees.optimizer) for inner in (unit.degrees.weights, 1))
        weight = unit.weight
        stores = unit.hops.placement.moves_weights and len(weight) > 0
        if not hops and replicated is None and not stores:
            if stepped is not None:
                self._tickets[unit.spec.name] = stepped
            return
        if stepped is not None and (packing is not None or replicated is not None):
            # What is sent is made of the masters, when the gather starts.
            stepped.wait()
            stepped = None

        def steps(workspace: Workspace) -> list[HopStep]:
            found = _gathers(unit, hops, packing, workspace) if hops else []
            found += [] if replicated is None else replicated.steps(all_hops)
            if stores and offloaded is not None:
                found.append(HopStep(offloaded.writes, lambda: offloaded.store.store(unit.spec.name, weight)))
            if stepped is not None and unit.at_rest is None:
                found[0] = found[0].first(stepped.wait)
            return found

        self._count(gather_traffic("update", hops, unit.weight.numel(), unit.weight.itemsize, packing))
        if replicated is not None:
            self._count(replicated.traffic(all_hops))
        ticket: Ticket = self._in_flight.start(steps)[-1]
        # What the host steps is written at rest beside what the device has stepped.
        apart = stepped is not None and unit.at_rest is not None
        self._tickets[unit.spec.name] = JoinedTicket([stepped, ticket]) if stepped and apart else ticket

    def take(self, name: str) -> Ticket | None:
        """Return the ticket of a unit's pending update, or None; the caller waits for it. Collective."""
        for one in [one for one in self._later if self._places[one] < self._places[name] + UPDATED_TOGETHER]:
            unit, stepped = self._later.pop(one)
            stepped.wait()
            self._begin(unit)
        return self._tickets.pop(name, None)

    def wait(self, name: str) -> None:
        """Wait for a unit's update before the next computation. Collective."""
        ticket = self.take(name)
        if ticket is not None:
            ticket.wait()

    def finish(self) -> None:
        """Wait for all updates. Collective."""
        for name in [*self._later, *self._tickets]:
            self.wait(name)


def _gathers(unit: ShardedUnit, hops: tuple[Hop, ...], packing: Packing | None, workspace: Workspace) -> list[HopStep]:
    if packing is not None:
        masters = unit.masters
        steps = all_gather_packed(unit.weight, masters, hops, packing, workspace)
        # Masters that come from the host are a tensor of this stream, and the first step reads it on another.
        steps[0] = steps[0].then(lambda: stays_for_stream(masters))
        return steps
    return all_gather(unit.weight, hops)
