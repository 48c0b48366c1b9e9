"""The gathered weights of units: prefetched, kept while they are needed again soon, then released."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from llmtrain.comm.stream import Ticket
from llmtrain.comm.workspace import Workspace
from llmtrain.sharding.buffer_pool import BufferPool
from llmtrain.sharding.collectives import HopStep, Packing
from llmtrain.sharding.in_flight import InFlight
from llmtrain.sharding.prefetch_order import PrefetchOrder
from llmtrain.sharding.replicated import ReplicatedParameters
from llmtrain.sharding.traffic import Count
from llmtrain.sharding.unit import ShardedUnit
from llmtrain.sharding.weight_gathers import SecondaryCopy, ShardGather, WeightSource, share_shards
from llmtrain.sharding.weight_updates import WeightUpdates


@dataclass
class Gathered:
    """A unit's gathered weights in a buffer of the pool. busy: whether a computation needs them right now."""

    buffer: Tensor
    ticket: Ticket
    busy: bool = False


@dataclass(frozen=True)
class WeightPolicy:
    """How weights are gathered and kept. packing: of gathers. secondary: of the secondary copy. lookahead: units that
    are prefetched; a unit that is among the next units stays gathered. together: units that compute at the same time.
    held: whether a unit stays gathered until the optimizer steps it. tensor_parallel: whether tensor-parallel ranks
    hold replicated parameters, which are then sent unpacked."""

    packing: Packing | None = None
    secondary: Packing | None = None
    lookahead: int = 2
    together: int = 1
    held: bool = False
    tensor_parallel: bool = False

    @property
    def buffers(self) -> int:
        """Most units of one size that are gathered at the same time."""
        return self.together + self.lookahead


class GatheredWeights:
    """Keeps the weights of a unit gathered from `need` until `release`."""

    def __init__(self, units: Mapping[str, ShardedUnit], policy: WeightPolicy, count: Count) -> None:
        self._units, self._policy, self._count = units, policy, count
        some = next(iter(units.values())).weight
        self._cut = {name: unit for name, unit in units.items() if unit.degrees.weights > 1}
        most = len(self._cut) if policy.held else policy.buffers
        self.pool = BufferPool([unit.ranges.padded for unit in self._cut.values()], most, some.dtype, some.device)
        self.in_flight = InFlight(some.device, max(len(unit.hops.weights) for unit in units.values()) + 1)
        self._orders: dict[str, PrefetchOrder] = {}
        self._order = PrefetchOrder()
        self._gathered: dict[str, Gathered] = {}
        self._owners: dict[int, str] = {}
        self._backward = False
        self._secondary = {
            name: SecondaryCopy(unit, policy.secondary) for name, unit in units.items() if unit.degrees.secondary
        }
        self._replicated = {name: ReplicatedParameters(unit) for name, unit in units.items() if _is_apart(unit, policy)}
        self.updates = WeightUpdates(policy.packing, self._replicated, self.in_flight, count)
        self._shared = share_shards(self._cut.values()) if policy.packing is None else {}
        gathers = {name: ShardGather(unit, policy.packing) for name, unit in self._cut.items()}
        self._sources: dict[str, WeightSource] = {**gathers, **self._shared}

    @property
    def secondary_bytes(self) -> int:
        """Bytes of this rank's shards of secondary copies."""
        return sum(copy.nbytes for copy in self._secondary.values())

    @property
    def replicated_bytes(self) -> int:
        """Bytes of the TP-replicated parameters that are kept apart from the weights."""
        return sum(values.nbytes for values in self._replicated.values())

    def start_pass(self, name: str) -> None:
        """Begin a pass called `name`, which uses the units in the same order as earlier ones of that name."""
        self._order = self._orders.setdefault(name, PrefetchOrder())
        self._order.start()
        self._backward = False
        self._look_ahead()

    def start_backward(self, backward: bool) -> None:
        """Say whether gathers are for a backward pass from here on."""
        self._backward = backward

    def need(self, name: str) -> Tensor:
        """Return the gathered weights of a unit; its parameters become views into them."""
        unit = self._units[name]
        if name not in self._cut:
            self.updates.wait(name)
            return unit.weight
        gathered = self._gathered.get(name)
        if gathered is not None and gathered.busy:
            return gathered.buffer
        self._order.use(name, self._backward)
        if gathered is None:
            gathered = self._gather(unit, self._take(unit))
        gathered.busy = True
        gathered.ticket.wait()
        unit.parameters.show(gathered.buffer)
        self._look_ahead()
        return gathered.buffer

    def release(self, name: str) -> None:
        """Report that a computation no longer needs a unit; it stays gathered if it is among the next units."""
        gathered = self._gathered.get(name)
        if gathered is None or not gathered.busy:
            return
        gathered.busy = False
        if not self._policy.held and name not in self._ahead():
            self._drop(name)

    def end_forward(self) -> None:
        """End a forward pass that no backward pass follows.

        A resumed run does not repeat this pass, so the next step must not use what it gathered: weights from a
        quantized secondary copy are rounded a second time.
        """
        for copy in self._secondary.values():
            copy.valid = False
        if self._policy.secondary is not None and not self._policy.held:
            for name in list(self._gathered):
                self._drop(name)

    def owner_of(self, tensor: Tensor) -> str | None:
        """Return the unit whose gathered weights `tensor` is a part of, if any."""
        return self._owners.get(tensor.untyped_storage().data_ptr()) if self._owners else None

    def update(self, unit: ShardedUnit) -> None:
        """Update the weights of all ranks after a step of the unit's masters. Collective."""
        name = unit.spec.name
        if name in self._secondary:
            self._secondary[name].valid = False
        if name in self._shared:
            self._shared[name].wrote()
        if name in self._gathered:
            self._drop(name)
        self.updates.start(unit)

    def _ahead(self) -> list[str]:
        """Return the next units.

        With a quantized secondary copy, never prefetch from the forward into the backward pass: the values that a pass
        reads must not depend on whether this process already knows the order.
        """
        return self._order.ahead(self._policy.lookahead, None if self._policy.secondary is None else self._backward)

    def _look_ahead(self) -> None:
        for name in self._ahead():
            if name not in self._gathered:
                buffer = self.pool.take(self._units[name].ranges.padded)
                if buffer is None:
                    return
                self._gather(self._units[name], buffer)

    def _take(self, unit: ShardedUnit) -> Tensor:
        """Return a buffer for a unit that is needed now; drop a prefetched unit if no buffer is free."""
        size = unit.ranges.padded
        buffer = self.pool.take(size)
        if buffer is None:
            idle = [name for name, one in self._gathered.items() if not one.busy and one.buffer.numel() == size]
            if not idle:
                raise RuntimeError(f"no buffer for {unit.spec.name}: more units compute at once than were planned for")
            self._drop(idle[-1])
            buffer = self.pool.take(size)
        assert buffer is not None
        return buffer

    def _drop(self, name: str) -> None:
        gathered = self._gathered.pop(name)
        # A gather that nobody waited for may still write into the buffer.
        gathered.ticket.wait()
        del self._owners[gathered.buffer.data_ptr()]
        self.pool.give_back(gathered.buffer)

    def _gather(self, unit: ShardedUnit, buffer: Tensor) -> Gathered:
        name = unit.spec.name
        secondary, replicated = self._secondary.get(name), self._replicated.get(name)
        source = secondary if secondary is not None and secondary.serves(self._backward) else self._sources[name]
        fills = secondary if secondary is not None and not secondary.valid else None
        # The update of these weights runs on other streams, so the gather has to wait for it explicitly.
        update = self.updates.take(name)

        def steps(workspace: Workspace) -> list[HopStep]:
            found = source.steps(buffer, workspace)
            if replicated is not None:
                found[-1] = found[-1].then(lambda: replicated.put(buffer, 0))
            if fills is not None:
                found[-1] = found[-1].then(lambda: fills.fill(buffer))
            if update is not None:
                found[0] = found[0].first(update.wait)
            return found

        self._count(source.traffic())
        if fills is not None:
            fills.valid = True
        gathered = self._gathered[name] = Gathered(buffer, self.in_flight.start(steps)[-1])
        self._owners[buffer.data_ptr()] = name
        return gathered


def _is_apart(unit: ShardedUnit, policy: WeightPolicy) -> bool:
    """Whether the unit's replicated parameters are sent unpacked, apart from the rest."""
    packed = (policy.packing or policy.secondary) is not None and unit.degrees.optimizer > 1
    return policy.tensor_parallel and packed and unit.spec.replicated < unit.spec.numel
