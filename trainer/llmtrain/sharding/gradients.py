"""Gradients from autograd to the optimizer's shard: summed over microbatches in fp32 and over ranks hop by hop, while
the backward pass of earlier units still runs.

The first hops, from whole gradients to the gradient shard, go in every microbatch; the second ones, on to the optimizer
shard, at the last (MiCS, section 3.4, which all-reduces there: twice the bytes). Only where several ranks hold the same
optimizer shard is the sum gathered back among them.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmtrain.cluster.levels import Degrees
from llmtrain.sharding.arena import Arena
from llmtrain.sharding.collectives import Packing, Stage, all_gather, own_part, reduce_scatter
from llmtrain.sharding.flights import Flights
from llmtrain.sharding.hops import Hops
from llmtrain.sharding.lane import Ticket
from llmtrain.sharding.scratch import Scratch
from llmtrain.sharding.traffic import gather_traffic, reduce_traffic
from llmtrain.sharding.unit import ShardedUnit
from llmtrain.sharding.weights import Count

# Whole gradients of one size on their way at once: one is filled while another is sent.
BUFFERS = 2


@dataclass
class _Filling:
    """A unit's gradients as autograd hands them over: those still missing, and where each goes."""

    missing: int
    views: list[Tensor]
    buffer: Tensor | None


class GradientReducer:
    """Sums the gradients of units; `done` hears of each unit whose gradients of a microbatch are complete."""

    def __init__(
        self, units: Mapping[str, ShardedUnit], degrees: Degrees, hops: Hops, packing: Packing | None, count: Count,
        done: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._units, self._degrees, self._packing = units, degrees, packing
        self._count, self._done = count, done
        some = next(iter(units.values()))
        self._wire = some.weight.dtype
        self._first_hops = hops.reduce(1, degrees.gradients)
        self._second_hops = hops.reduce(degrees.gradients, degrees.optimizer)
        self._replica_hops = hops.reduce(degrees.optimizer, degrees.ranks)
        self._back_hops = hops.gather(degrees.optimizer, degrees.ranks)
        sizes = [unit.cut.padded for unit in units.values()] if degrees.gradients > 1 else []
        self.arena = Arena(sizes, BUFFERS, self._wire, some.gradient.device)
        self.flights = Flights(some.gradient.device, len(hops.gradients) + 1)
        self._filling: dict[str, _Filling] = {}
        self._sent: deque[tuple[Ticket, Tensor]] = deque()
        self._completing: list[Ticket] = []
        self._first = self._last = True
        # Where gradients stay whole they are summed where they lie.
        self._views = {} if sizes else {name: unit.views(unit.gradient) for name, unit in units.items()}
        for name, unit in units.items():
            for place, parameter in enumerate(unit.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(name, place))

    def start_microbatch(self, first: bool, last: bool) -> None:
        """Begin a microbatch. The `first` one replaces earlier sums; the `last` one completes them over all ranks."""
        self._first, self._last = first, last
        self._filling.clear()

    def finish_microbatch(self) -> None:
        """Wait, after the last microbatch, until the sums are complete. Raises RuntimeError where any is not."""
        missing = [unit for unit in self._units if unit not in self._filling or self._filling[unit].missing]
        if missing:
            raise RuntimeError(f"parameters without a gradient in {', '.join(missing)}")
        if self._last:
            while self._sent:
                self._receive()
            for ticket in self._completing:
                ticket.wait()
            self._completing.clear()

    def squared_norm(self) -> Tensor:
        """Return the sum of squares of the summed gradients over all ranks that hold them, fp64 scalar.

        The sum over all data-parallel ranks of what each returns is that of the whole model.
        """
        norms = torch.stack([torch.linalg.vector_norm(unit.owned_gradient) for unit in self._units.values()])
        return norms.double().square().sum() * (self._degrees.optimizer / self._degrees.ranks)

    def _hook(self, name: str, place: int) -> Callable[[nn.Parameter], None]:
        def accumulated(parameter: nn.Parameter) -> None:
            # Autograd hands over a gradient of the compute dtype; microbatches are summed in fp32.
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            filling = self._filling.get(name) or self._start(name)
            if filling.buffer is None and not self._first:
                filling.views[place].add_(gradient)
            else:
                filling.views[place].copy_(gradient)
            filling.missing -= 1
            if filling.missing == 0:
                self._send(name, filling)
                self._done(name)

        return accumulated

    def _start(self, name: str) -> _Filling:
        unit = self._units[name]
        buffer = None if self._views else self._take(unit.cut.padded)
        views = self._views[name] if buffer is None else unit.views(buffer)
        if buffer is not None:
            buffer[unit.spec.numel :].zero_()
        filling = self._filling[name] = _Filling(len(unit.parameters), views, buffer)
        return filling

    def _take(self, size: int) -> Tensor:
        while (buffer := self.arena.take(size)) is None:
            self._receive()
        return buffer

    def _receive(self) -> None:
        ticket, buffer = self._sent.popleft()
        ticket.wait()
        self.arena.give_back(buffer)

    def _send(self, name: str, filling: _Filling) -> None:
        unit, first, last = self._units[name], self._first, self._last
        buffer, filling.buffer, filling.views = filling.buffer, None, []
        if self._degrees.ranks == 1 or (buffer is None and not last):
            return
        self._count_bytes(unit, last)

        def stages(flight: Scratch) -> list[Stage]:
            found = self._first_stages(unit, buffer, first, flight) if buffer is not None else []
            return [*found, *self._last_stages(unit, flight)] if last else found

        tickets = self.flights.start(stages)
        if buffer is not None:
            # The first hop has it all; what goes on from there lies elsewhere.
            self._sent.append((tickets[0], buffer))
        if last:
            self._completing += tickets[-1:]

    def _first_stages(self, unit: ShardedUnit, buffer: Tensor, first: bool, flight: Scratch) -> list[Stage]:
        """Sum one microbatch's gradients over the ranks that its sum is cut over."""
        (*stages, end), part = reduce_scatter(buffer, self._first_hops, self._wire, self._packing, flight)
        return [*stages, end.then(lambda: unit.gradient.copy_(part) if first else unit.gradient.add_(part))]

    def _last_stages(self, unit: ShardedUnit, flight: Scratch) -> list[Stage]:
        """Sum the gradient shard over all other ranks, and gather back what several of them step with."""
        hops, owned = (*self._second_hops, *self._replica_hops), unit.owned_gradient
        if not hops:
            return []
        (*stages, end), part = reduce_scatter(unit.gradient, hops, self._wire, self._packing, flight)
        whole = owned if self._wire == owned.dtype else flight.take("whole", len(owned), self._wire)
        target = own_part(whole, self._replica_hops)
        stages.append(end.then(lambda: target.copy_(part)))
        stages += all_gather(whole, self._back_hops)
        if whole is not owned:
            stages[-1] = stages[-1].then(lambda: owned.copy_(whole))
        return stages

    def _count_bytes(self, unit: ShardedUnit, last: bool) -> None:
        padded, cut, size = unit.cut.padded, self._degrees, self._wire.itemsize
        if cut.gradients > 1:
            self._count(reduce_traffic("gradients", self._first_hops, padded, size, self._packing))
        if last:
            shard, owned = padded // cut.gradients, padded // cut.optimizer
            self._count(reduce_traffic("gradients", self._second_hops, shard, size, self._packing))
            self._count(reduce_traffic("replicas", self._replica_hops, owned, size, self._packing))
            self._count(gather_traffic("replicas", self._replica_hops, owned, size, None))
