"""Whole weights when a unit computes: gathered ahead of need, kept while soon needed again, released after."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from llmtrain.cluster.levels import Degrees
from llmtrain.comm.collectives import SharedParts
from llmtrain.comm.stream import Ticket
from llmtrain.comm.workspace import Workspace
from llmtrain.sharding.buffer_pool import BufferPool
from llmtrain.sharding.collectives import HopStep, Packing, all_gather, all_gather_packed, own_part
from llmtrain.sharding.hops import Hop, Hops
from llmtrain.sharding.in_flight import InFlight
from llmtrain.sharding.prefetch_order import PrefetchOrder
from llmtrain.sharding.replicated import ReplicatedParameters
from llmtrain.sharding.traffic import Traffic, gather_traffic
from llmtrain.sharding.unit import ShardedUnit

Count = Callable[[Iterable[Traffic]], None]


@dataclass
class Whole:
    """A unit's whole weights in a buffer of the pool. busy: whether a computation needs them right now."""

    buffer: Tensor
    ticket: Ticket
    busy: bool = False


@dataclass(frozen=True)
class WeightPolicy:
    """How weights travel and rest. packing: of gathers; secondary: of the second copy. lookahead: units gathered ahead
    of need, and uses within which a unit is kept. together: units that compute at one time. held: whether a unit stays
    whole until its weights are stepped. tensor_parallel: whether tensor-parallel ranks share a part of each unit, which
    then travels by itself where the rest is packed."""

    packing: Packing | None = None
    secondary: Packing | None = None
    lookahead: int = 2
    together: int = 1
    held: bool = False
    tensor_parallel: bool = False

    @property
    def buffers(self) -> int:
        """Whole units of one size that are ever there at once."""
        return self.together + self.lookahead


class WeightKeeper:
    """Has the weights of a unit whole from `need` until `release`."""

    def __init__(
        self, units: Mapping[str, ShardedUnit], degrees: Degrees, hops: Hops, policy: WeightPolicy, count: Count
    ) -> None:
        self._units, self._degrees, self._hops, self._policy = units, degrees, hops, policy
        self._count = count
        some = next(iter(units.values())).weight
        self._sharded = degrees.weights > 1
        sizes = [unit.ranges.padded for unit in units.values()] if self._sharded else []
        most = len(sizes) if policy.held else policy.buffers
        self.pool = BufferPool(sizes, most, some.dtype, some.device)
        self.in_flight = InFlight(some.device, len(hops.weights) + 1)
        self._orders: dict[str, PrefetchOrder] = {}
        self._order = PrefetchOrder()
        self._whole: dict[str, Whole] = {}
        self._owners: dict[int, str] = {}
        self._updates: dict[str, Ticket] = {}
        self._copied: set[str] = set()
        self._backward = False
        for unit in units.values():
            unit.secondary = self._new_secondary(unit)
        apart = policy.tensor_parallel and degrees.optimizer > 1 and (policy.packing or policy.secondary) is not None
        shared = [name for name, unit in units.items() if apart and unit.spec.replicated < unit.spec.numel]
        self._replicated = {name: ReplicatedParameters(units[name]) for name in shared}
        self._shared: SharedParts | None = None
        self._seen = self._show()
        self._written = set(self._seen)

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
        """Return the whole weights of a unit, which its parameters show from now on."""
        unit = self._units[name]
        if not self._sharded:
            if self._updates:
                self._wait_for_update(name)
            return unit.weight
        whole = self._whole.get(name)
        if whole is not None and whole.busy:
            return whole.buffer
        self._order.use(name, self._backward)
        if whole is None:
            whole = self._gather(unit, self._take(unit))
        whole.busy = True
        whole.ticket.wait()
        for parameter, view in zip(unit.parameters, unit.lasting_views(whole.buffer), strict=True):
            parameter.data = view
        self._look_ahead()
        return whole.buffer

    def release(self, name: str) -> None:
        """Say that the computation is done with a unit; it stays if the next few uses need it again."""
        whole = self._whole.get(name)
        if whole is None or not whole.busy:
            return
        whole.busy = False
        if not self._policy.held and name not in self._ahead():
            self._drop(name)

    def end_forward(self) -> None:
        """End a pass without a backward one. What it leaves must not show in the next step, which a resumed run does
        without it: a packed second copy is rounded once more."""
        self._copied.clear()
        if self._policy.secondary is not None and not self._policy.held:
            for name in list(self._whole):
                self._drop(name)

    def owner_of(self, tensor: Tensor) -> str | None:
        """Return the unit whose whole weights `tensor` is a part of, if any."""
        return self._owners.get(tensor.untyped_storage().data_ptr()) if self._owners else None

    def update(self, unit: ShardedUnit) -> None:
        """Bring the weights of all ranks up to date after a step of `unit`'s masters. What was whole is out of date."""
        self._copied.discard(unit.spec.name)
        self._written.add(unit.spec.name)
        if unit.spec.name in self._whole:
            self._drop(unit.spec.name)
        degrees, packing, replicated = self._degrees, self._policy.packing, self._replicated.get(unit.spec.name)
        hops, all_hops = (self._hops.gather(inner, degrees.optimizer) for inner in (degrees.weights, 1))
        if not hops:
            unit.publish()
            if replicated is None:
                return

        def steps(workspace: Workspace) -> list[HopStep]:
            if packing is not None and hops:
                found = all_gather_packed(unit.weight, unit.master, hops, packing, workspace)
            else:
                found = all_gather(unit.weight, hops)
                found[:1] = [first.first(unit.publish) for first in found[:1]]
            return found if replicated is None else [*found, *replicated.steps(all_hops)]

        self._count(gather_traffic("update", hops, unit.weight.numel(), unit.weight.itemsize, packing))
        if replicated is not None:
            self._count(replicated.traffic(all_hops))
        self._updates[unit.spec.name] = self.in_flight.start(steps)[-1]

    def finish_updates(self) -> None:
        """Wait until every update has arrived."""
        for name in list(self._updates):
            self._wait_for_update(name)

    def _wait_for_update(self, name: str) -> None:
        ticket = self._updates.pop(name, None)
        if ticket is not None:
            ticket.wait()

    def _ahead(self) -> list[str]:
        """Return the units that are needed next.

        Beside a packed second copy, which is rounded once more, not beyond a turn of passes: what a use reads must not
        depend on whether this process knows the order already.
        """
        return self._order.ahead(self._policy.lookahead, None if self._policy.secondary is None else self._backward)

    def _look_ahead(self) -> None:
        for name in self._ahead():
            if name not in self._whole:
                buffer = self.pool.take(self._units[name].ranges.padded)
                if buffer is None:
                    return
                self._gather(self._units[name], buffer)

    def _take(self, unit: ShardedUnit) -> Tensor:
        """Return a buffer for a unit that cannot wait, if need be one that was gathered too early."""
        buffer = self.pool.take(unit.ranges.padded)
        if buffer is None:
            size = unit.ranges.padded
            idle = [name for name, whole in self._whole.items() if not whole.busy and whole.buffer.numel() == size]
            if not idle:
                raise RuntimeError(f"no buffer for {unit.spec.name}: more units compute at once than were planned for")
            self._drop(idle[-1])
            buffer = self.pool.take(size)
        assert buffer is not None
        return buffer

    def _drop(self, name: str) -> None:
        whole = self._whole.pop(name)
        # A gather that nobody waited for still writes into the buffer.
        whole.ticket.wait()
        del self._owners[whole.buffer.data_ptr()]
        self.pool.give_back(whole.buffer)

    def _gather(self, unit: ShardedUnit, buffer: Tensor) -> Whole:
        name, degrees, policy = unit.spec.name, self._degrees, self._policy
        # The second copy serves as soon as it is there, and forward passes as well where it lies no farther away.
        second = name in self._copied and (self._backward or degrees.secondary <= degrees.weights)
        hops = self._hops.gather(1, degrees.secondary if second else degrees.weights)
        packing, purpose = (policy.secondary, "secondary") if second else (policy.packing, "weights")
        copy = unit.secondary is not None and name not in self._copied
        # The update of these weights goes over other hops, whose streams no gather waits for by itself.
        update, replicated = self._updates.pop(name, None), self._replicated.get(name)

        def steps(workspace: Workspace) -> list[HopStep]:
            found = self._steps(unit, buffer, hops, packing, second, workspace)
            if replicated is not None:
                found[-1] = found[-1].then(lambda: replicated.put(buffer, 0))
            if copy:
                found[-1] = found[-1].then(lambda: self._copy(unit, buffer))
            if update is not None:
                found[0] = found[0].first(update.wait)
            return found

        self._count(gather_traffic(purpose, hops, buffer.numel(), buffer.itemsize, packing))
        if copy:
            self._copied.add(name)
        whole = self._whole[name] = Whole(buffer, self.in_flight.start(steps)[-1])
        self._owners[buffer.data_ptr()] = name
        return whole

    def _steps(
        self, unit: ShardedUnit, buffer: Tensor, hops: tuple[Hop, ...], packing: Packing | None, second: bool,
        workspace: Workspace,
    ) -> list[HopStep]:  # fmt: skip
        part = unit.secondary if second else unit.weight
        assert part is not None
        if not hops:
            # A second copy on every rank is whole already.
            restore = partial(packing.unpack, part) if packing else lambda whole: whole.copy_(part)
            return [HopStep(self._hops.weights[0], lambda: restore(buffer))]
        if packing is not None:
            return all_gather_packed(buffer, part, hops, packing, workspace, packed=second)
        if unit.spec.name in self._seen and not second:
            return [self._look(unit, buffer, hops[0])]
        own = own_part(buffer, hops)
        first, *rest = all_gather(buffer, hops)
        return [first.first(lambda: own.copy_(part)), *rest]

    def _show(self) -> dict[str, list[Tensor]]:
        """Move weights that one hop inside a machine gathers to where all its ranks see them. Collective.

        Returns where they are, by unit and by member.

        Read without a message but the first after they were written. None is written while others read it: a unit is
        stepped when its gradients are summed, over the same ranks, each of which has computed with it before.
        """
        hops = self._hops.gather(1, self._degrees.weights)
        if self._policy.packing is not None or len(hops) != 1:
            return {}
        collectives = hops[0].collectives
        self._shared = collectives.share(sum(unit.weight.nbytes for unit in self._units.values()))
        seen, start = {}, 0
        parts = self._shared.parts if self._shared else ()
        for name, unit in self._units.items() if parts else ():
            end = start + unit.weight.nbytes
            seen[name] = [part[start:end].view(unit.weight.dtype) for part in parts]
            unit.move_weight(seen[name][collectives.rank])
            start = end
        return seen

    def _look(self, unit: ShardedUnit, buffer: Tensor, hop: Hop) -> HopStep:
        """Fill `buffer` with the weights that the hop's ranks show."""
        name, places, shared = unit.spec.name, buffer.chunk(hop.radix), self._shared
        written = name in self._written
        self._written.discard(name)

        def read() -> None:
            if written and shared is not None:
                shared.sync()
            for place, part in zip(hop.collectives.order, self._seen[name], strict=True):
                places[place].copy_(part)

        return HopStep(hop, read)

    def _copy(self, unit: ShardedUnit, buffer: Tensor) -> None:
        assert unit.secondary is not None
        part, packing = own_part(buffer, self._hops.gather(1, self._degrees.secondary)), self._policy.secondary
        if packing is None:
            unit.secondary.copy_(part)
        else:
            packing.pack(part, unit.secondary)

    def _new_secondary(self, unit: ShardedUnit) -> Tensor | None:
        if not self._degrees.secondary:
            return None
        numel, packing = unit.ranges.padded // self._degrees.secondary, self._policy.secondary
        if packing is None:
            return torch.zeros(numel, dtype=unit.weight.dtype, device=unit.weight.device)
        return torch.zeros(packing.row_bytes(numel), dtype=torch.uint8, device=unit.weight.device)
