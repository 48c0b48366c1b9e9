"""The gathered weights of units, in one buffer pool at the offsets that the program has."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from llmtrain.comm.device import new_buffer_pool
from llmtrain.comm.waits import Ticket
from llmtrain.comm.workspace import Workspace
from llmtrain.plan.per_rank.states import updates_apart
from llmtrain.plan.program.instructions import Drop, Gather
from llmtrain.plan.traffic import CountTraffic
from llmtrain.sharding.buffer_pool import views_overlap
from llmtrain.sharding.collectives import HopStep, Packing
from llmtrain.sharding.in_flight import InFlight
from llmtrain.sharding.offloaded_weights import OffloadedGather, OffloadedWeights
from llmtrain.sharding.replicated import ReplicatedParameters
from llmtrain.sharding.secondary_copy import SecondaryCopy
from llmtrain.sharding.unit import ShardedUnit
from llmtrain.sharding.weight_gathers import ShardGather, WeightSource, share_shards
from llmtrain.sharding.weight_updates import Sending, Update, WeightUpdates, new_update, store_part


@dataclass(frozen=True)
class WeightPolicy:
    """How weights are gathered. packing: how gathers pack weights. secondary: how the secondary copy packs them. None:
    unpacked. tensor_parallel: whether tensor-parallel ranks hold replicated parameters, which are then sent unpacked.
    offloaded: where the shards rest that are not on the device. stored: by unit with such a shard, how many elements of
    the new one the device has after a step, until they are stored. updated: the first element of the buffer pool that
    holds them; units without any are left out."""

    packing: Packing | None = None
    secondary: Packing | None = None
    tensor_parallel: bool = False
    offloaded: OffloadedWeights | None = None
    stored: Mapping[str, int] = field(default_factory=dict)
    updated: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Gathered:
    buffer: Tensor
    ticket: Ticket


class GatheredWeights:
    """Gathers the weights of units into a buffer pool, and updates the shards after an optimizer step."""

    def __init__(
        self,
        units: Mapping[str, ShardedUnit],
        policy: WeightPolicy,
        elements: int,
        in_flight: InFlight,
        count: CountTraffic,
    ) -> None:
        """elements: size of the buffer pool."""
        self._units, self._policy, self._count = units, policy, count
        some = next(iter(units.values())).weight
        offloaded = {name for name, unit in units.items() if unit.hops.placement.moves_weights}
        self.gathered = {name: unit for name, unit in units.items() if unit.degrees.weights > 1 or name in offloaded}
        self.pool = new_buffer_pool(elements, some.dtype, some.device)
        self.in_flight = in_flight
        self._gathered: dict[str, _Gathered] = {}
        self._secondary = {
            name: SecondaryCopy(unit, policy.secondary) for name, unit in units.items() if unit.degrees.secondary
        }
        packed = (policy.packing or policy.secondary) is not None
        self._replicated = {
            name: ReplicatedParameters(unit)
            for name, unit in units.items()
            if updates_apart(unit.spec, unit.degrees, packed, policy.tensor_parallel)
        }
        sending = Sending(policy.packing, self._replicated, in_flight, count)
        self.updates = WeightUpdates({name: self._update(unit, sending) for name, unit in units.items()})
        on_device = [unit for name, unit in self.gathered.items() if name not in offloaded]
        self._shared = share_shards(on_device) if policy.packing is None else {}
        gathers = {unit.spec.name: ShardGather(unit, policy.packing) for unit in on_device}
        brought = {
            name: OffloadedGather(units[name], policy.packing, policy.offloaded)
            for name in offloaded
            if policy.offloaded
        }
        self._sources: dict[str, WeightSource] = {**gathers, **self._shared, **brought}
        # The parts of the buffer pool from which new shards are being stored.
        self._storing: dict[str, Tensor] = {}

    @property
    def secondary_bytes(self) -> int:
        """Bytes of this rank's shards of secondary copies."""
        return sum(copy.nbytes for copy in self._secondary.values())

    @property
    def replicated_bytes(self) -> int:
        """Bytes of the TP-replicated parameters that are kept apart from the weights."""
        return sum(values.nbytes for values in self._replicated.values())

    def wait(self, name: str) -> Tensor:
        """Wait for a unit's weights and return them, flat `[padded]` of the compute dtype; its parameters become views
        into them."""
        unit = self._units[name]
        if name not in self.gathered:
            self.updates.wait(name)
            return unit.weight
        gathered, offloaded = self._gathered[name], self._policy.offloaded
        if offloaded is not None and unit.hops.placement.moves_weights:
            offloaded.stalls.timed(gathered.ticket.wait)
        else:
            gathered.ticket.wait()
        unit.parameters.show(gathered.buffer)
        return gathered.buffer

    def buffer(self, name: str) -> Tensor:
        """Return the weights of a unit that was waited for, flat `[padded]` of the compute dtype."""
        return self._gathered[name].buffer if name in self.gathered else self._units[name].weight

    def owner_of(self, tensor: Tensor) -> str | None:
        """Return the unit whose gathered weights contain `tensor`, a view of any shape and dtype, if any."""
        if tensor.untyped_storage().data_ptr() != self.pool.untyped_storage().data_ptr():
            return None
        offset = tensor.storage_offset()
        for name, gathered in self._gathered.items():
            if 0 <= offset - gathered.buffer.storage_offset() < gathered.buffer.numel():
                return name
        return None

    def open(self, unit: ShardedUnit) -> None:
        """Allocate device memory for the elements of an offloaded shard that the device steps; `update` reads them
        there."""
        name = unit.spec.name
        if not unit.hops.placement.moves_weights:
            return
        offset, elements = self._policy.updated.get(name, 0), self._policy.stored[name]
        unit.weight = self.pool[offset : offset + elements]
        if elements:
            self._wait_until_stored(unit.weight)
            self._storing[name] = unit.weight

    def update(self, unit: ShardedUnit, stepped: Ticket | None = None) -> None:
        """Update the weights of all ranks after a step of the unit's masters. stepped: a ticket of the step; None if it
        is done. Collective."""
        if unit.spec.name in self._shared:
            self._shared[unit.spec.name].wrote()
        self.updates.start(unit.spec.name, stepped)
        if unit.hops.placement.moves_weights:
            unit.weight = unit.weight[:0]

    def synchronize(self) -> None:
        """Wait until the device no longer uses weight shards that rest in the host's memory."""
        if self._policy.offloaded is not None:
            self._policy.offloaded.store.synchronize()

    def read(self, unit: ShardedUnit, start: int, end: int) -> Tensor:
        """Return the elements `[start, end)` of a unit, of the compute dtype, from its shard on this rank, after all
        updates."""
        first, offloaded = unit.ranges.weights[0], self._policy.offloaded
        if unit.hops.placement.moves_weights and offloaded is not None:
            return offloaded.store.read(unit.spec.name, start - first, end - first)
        return unit.weight[start - first : end - first]

    def drop(self, drop: Drop) -> None:
        """Free a unit's part of the buffer pool."""
        # A gather that nobody waited for may still write there.
        self._gathered.pop(drop.unit).ticket.wait()

    def gather(self, gather: Gather) -> None:
        """Start to gather a unit. Raises RuntimeError if the buffer pool has no such part."""
        name, unit = gather.unit, self._units[gather.unit]
        buffer = self.pool[gather.offset : gather.offset + unit.ranges.padded]
        if len(buffer) < unit.ranges.padded:
            raise RuntimeError(f"{name} is to be gathered at element {gather.offset} of {len(self.pool)}")
        source = self._secondary[name] if gather.secondary else self._sources[name]
        replicated = self._replicated.get(name)
        fills = self._secondary[name] if gather.fills else None
        self._wait_until_stored(buffer)
        # The update of these weights runs on other streams, so the gather has to wait for it explicitly.
        update = self.updates.take(name)
        self._storing.pop(name, None)

        def steps(workspace: Workspace) -> list[HopStep]:
            found = source.steps(buffer, workspace)
            if replicated is not None:
                found[-1] = found[-1].then(lambda: replicated.put(buffer, 0))
            if fills is not None:
                found[-1] = found[-1].then(lambda: fills.fill(buffer))
            found[0] = found[0].first(update.wait)
            return found

        self._count(source.traffic())
        self._gathered[name] = _Gathered(buffer, self.in_flight.start(steps)[-1])

    def _update(self, unit: ShardedUnit, sending: Sending) -> Update:
        if self._policy.offloaded is None or not self._policy.stored.get(unit.spec.name):
            return new_update(unit, sending)
        return new_update(unit, sending, [store_part(unit, self._policy.offloaded)])

    def _wait_until_stored(self, part: Tensor) -> None:
        """Wait until no new shard that lies in a part of the buffer pool is still being stored."""
        for name in [name for name, other in self._storing.items() if views_overlap(part, other)]:
            self.updates.wait(name)
            del self._storing[name]
