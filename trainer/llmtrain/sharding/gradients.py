"""Gradients from autograd to the optimizer's shard: summed over microbatches in fp32 and over ranks hop by hop, while
the backward pass of earlier units still runs.

The first hops, from whole gradients to the gradient shard, go in every microbatch; the second ones, on to the optimizer
shard, at the last (MiCS, section 3.4, which all-reduces there: twice the bytes). Only where several ranks hold the same
optimizer shard is the sum gathered back among them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from llmtrain.cluster.levels import Degrees
from llmtrain.comm.collectives import Collectives
from llmtrain.comm.stream import Ticket
from llmtrain.comm.workspace import Workspace
from llmtrain.sharding.buffer_pool import BufferPool
from llmtrain.sharding.collectives import HopStep, Packing, all_gather, own_part, reduce_scatter
from llmtrain.sharding.hops import Hops
from llmtrain.sharding.in_flight import InFlight
from llmtrain.sharding.traffic import gather_traffic, reduce_traffic
from llmtrain.sharding.unit import ShardedUnit
from llmtrain.sharding.weights import Count

# Whole gradients of one size on their way at once: one is filled while another is sent.
BUFFERS = 2


Received = tuple[nn.Parameter, Tensor]


@dataclass(frozen=True)
class ReplicaGroups:
    """What ranks beyond the data-parallel ones hold alike.

    copies: tensor-parallel ranks, which all hold the replicated suffix of each unit. partial: those of this rank, where
    each has only its part of that suffix's gradients (sequence parallelism). stage: all ranks of this pipeline stage,
    where gradients are packed: rounded by what lies beside it in a block, that suffix would drift apart. tied: by unit,
    the ranks of two pipeline stages that both compute with it. second: units of which an earlier stage has the first
    copy.
    """

    copies: int = 1
    partial: Collectives | None = None
    stage: Collectives | None = None
    tied: Mapping[str, Collectives] = field(default_factory=dict)
    second: frozenset[str] = frozenset()


@dataclass(frozen=True)
class BackwardPass:
    """One backward pass through a unit.

    first, last: of the step's; the first replaces what the gradients held, the last completes their sums. leading:
    whether it uses the unit's first parameter alone.
    """

    name: str
    first: bool
    last: bool
    leading: bool = False


@dataclass
class _Filling:
    """A unit's gradients of one backward pass as autograd hands them over: those still missing, and where each goes.

    missing: 0 where autograd is not to tell of any. summed: autograd itself adds them to the sums, which are the
    parameters' `grad`.
    """

    backward_pass: BackwardPass
    missing: int
    summed: bool
    views: list[Tensor] = field(default_factory=list)
    buffer: Tensor | None = None


class GradientReducer:
    """Sums the gradients of units; `done` hears of each unit whose gradients of a microbatch are complete."""

    def __init__(
        self, units: Mapping[str, ShardedUnit], degrees: Degrees, hops: Hops, packing: Packing | None, replica_groups:
        ReplicaGroups, count: Count, done: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._units, self._degrees, self._packing, self.replica_groups = units, degrees, packing, replica_groups
        self._count, self._done = count, done
        some = next(iter(units.values()))
        self._wire = some.weight.dtype
        self._first_hops = hops.reduce(1, degrees.gradients)
        self._second_hops = hops.reduce(degrees.gradients, degrees.optimizer)
        self._replica_hops = hops.reduce(degrees.optimizer, degrees.ranks)
        self._back_hops = hops.gather(degrees.optimizer, degrees.ranks)
        sizes = [unit.ranges.padded for unit in units.values()] if degrees.gradients > 1 else []
        self.pool = BufferPool(sizes, BUFFERS, self._wire, some.gradient.device)
        self.in_flight = InFlight(some.gradient.device, len(hops.gradients) + 1)
        self._filling: dict[str, _Filling] = {}
        self._sent: deque[tuple[Ticket, Tensor]] = deque()
        self._completing: list[Ticket] = []
        self._held: list[Received] | None = None
        # Where gradients stay whole they are summed where they lie.
        self._views = {} if sizes else {name: unit.views(unit.gradient) for name, unit in units.items()}
        self._places = {
            parameter: (name, place) for name, unit in units.items() for place, parameter in enumerate(unit.parameters)
        }
        # By unit that is listened to. Python's collector does not see through what autograd holds, so hooks are taken
        # off at the end.
        self._hooks: dict[str, list[RemovableHandle]] = {}
        for name in units:
            self._listen(name, True)

    def start(self, backward_passes: Iterable[BackwardPass], passing: bool) -> None:
        """Begin a microbatch's backward pass. passing: whether autograd makes it now, and hands over all gradients."""
        # Whole sums in the dtype of what is added need no hand of ours, 5 us a parameter, until they are complete.
        whole = passing and bool(self._views) and self._wire == torch.float32
        for backward_pass in backward_passes:
            unit, summed = self._units[backward_pass.name], whole and not (backward_pass.first and backward_pass.last)
            told = backward_pass.last or not summed
            missing = 1 if backward_pass.leading else len(unit.parameters)
            before = self._filling.get(backward_pass.name)
            filling = self._filling[backward_pass.name] = _Filling(backward_pass, missing if told else 0, summed)
            self._listen(backward_pass.name, told)
            if summed:
                filling.views = self._views[backward_pass.name]
            if summed and backward_pass.first:
                unit.gradient.zero_()
            if backward_pass.first or not summed or not (before and before.summed):
                for place, parameter in enumerate(unit.parameters):
                    parameter.grad = filling.views[place] if summed else None

    def _listen(self, name: str, told: bool) -> None:
        """Have autograd tell, or not, of each gradient of a unit."""
        if told and name not in self._hooks:
            parameters = self._units[name].parameters
            self._hooks[name] = [one.register_post_accumulate_grad_hook(self._accumulated) for one in parameters]
        elif not told:
            for hook in self._hooks.pop(name, []):
                hook.remove()

    def check(self, backward_passes: Iterable[BackwardPass]) -> None:
        """Raise RuntimeError where a backward pass left out gradients."""
        missing = [backward_pass.name for backward_pass in backward_passes if self._filling[backward_pass.name].missing]
        if missing:
            raise RuntimeError(f"parameters without a gradient in {', '.join(missing)}")

    def finish(self) -> None:
        """Wait, after the last microbatch, until the sums are complete."""
        while self._sent:
            self._receive()
        for ticket in self._completing:
            ticket.wait()
        self._completing.clear()
        if self._degrees.ranks == 1:
            for unit in self._units.values():
                self._sum_partial(unit, unit.gradient)
        if self.replica_groups.stage is not None:
            self._level(self.replica_groups.stage)
        for name, group in self.replica_groups.tied.items():
            group.all_reduce(self._units[name].owned_gradient).wait()

    def _level(self, stage: Collectives) -> None:
        """Bring the replicated suffixes of all units to the mean of what the stage's ranks have of them."""
        units = self._units.values()
        sizes = [unit.spec.numel - unit.spec.replicated for unit in units]
        every = torch.zeros(sum(sizes), device=next(iter(units)).gradient.device)
        held: list[tuple[Tensor, Tensor]] = []
        for unit, whole in zip(units, every.split(sizes), strict=True):
            start, end = (max(place - unit.spec.replicated, 0) for place in unit.ranges.optimizer)
            place = unit.own(unit.spec.replicated)
            held.append((unit.owned_gradient[place : place + len(whole[start:end])], whole[start:end]))
        for own, part in held:
            part.copy_(own)
        stage.all_reduce(every).wait()
        every.mul_(self._degrees.optimizer / (self._degrees.ranks * self.replica_groups.copies))
        for own, part in held:
            own.copy_(part)

    @contextmanager
    def held(self, names: Iterable[str]) -> Iterator[list[Received]]:
        """Keep what autograd hands over inside, of the units of `names`, for `take_in`."""
        for name in names:
            self._listen(name, True)
            for parameter in self._units[name].parameters:
                # Nor is it added to sums that passes before have left there.
                parameter.grad = None
        self._held = []
        yield self._held
        self._held = None

    def take_in(self, received: Iterable[Received], products: Iterable[Received]) -> None:
        """Take gradients of parameters: those that are there, and those that come one by one, unit by unit."""
        there: dict[str, list[tuple[int, Tensor]]] = {}
        for parameter, gradient in received:
            name, place = self._places[parameter]
            there.setdefault(name, []).append((place, gradient))
        for name in [name for name, found in there.items() if len(found) == self._filling[name].missing]:
            # Nothing of it is still to come, so its sum over the ranks may begin.
            for early in there.pop(name):
                self._add(name, *early)
        for parameter, gradient in products:
            name, place = self._places[parameter]
            # One unit after another: only few have a buffer at a time.
            for early in there.pop(name, []):
                self._add(name, *early)
            self._add(name, place, gradient)
        for name, early_ones in there.items():
            for early in early_ones:
                self._add(name, *early)

    def close(self) -> None:
        """Leave the parameters alone, and the process groups of what is held alike."""
        for name in self._units:
            self._listen(name, False)
        for group in (self.replica_groups.partial, self.replica_groups.stage, *self.replica_groups.tied.values()):
            if group is not None:
                group.close()

    def squared_norm(self) -> Tensor:
        """Return the sum of squares of the summed gradients over all ranks that hold them, fp64 scalar.

        The sum over all ranks of what each returns is that of the whole model.
        """
        parts = [part for name, unit in self._units.items() for part in self._parts(name, unit)]
        squares = torch.stack([torch.linalg.vector_norm(part) for part, _ in parts]).double().square()
        shares = torch.tensor([share for _, share in parts], dtype=torch.float64, device=squares.device)
        return (squares * shares).sum() * (self._degrees.optimizer / self._degrees.ranks)

    def _parts(self, name: str, unit: ShardedUnit) -> list[tuple[Tensor, float]]:
        """Return parts of the unit's gradients, each with the share of its square that counts here."""
        if name in self.replica_groups.second:
            return []
        if self.replica_groups.copies == 1:
            return [(unit.owned_gradient, 1.0)]
        cut, replicated = unit.own(unit.spec.replicated), 1 / self.replica_groups.copies
        return [(unit.owned_gradient[:cut], 1.0), (unit.owned_gradient[cut:], replicated)]

    def _accumulated(self, parameter: nn.Parameter) -> None:
        if self._held is None:
            name = self._places[parameter][0]
            filling = self._filling[name]
            if filling.summed:
                self._added(name, filling)
                return
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            # A layer has put it off.
            return
        if self._held is None:
            self._add(*self._places[parameter], gradient)
        else:
            self._held.append((parameter, gradient))

    def _add(self, name: str, place: int, gradient: Tensor) -> None:
        # Autograd hands over a gradient of the compute dtype; microbatches are summed in fp32.
        filling = self._filling[name]
        if not filling.views:
            self._open(name, filling)
        if filling.buffer is None and not filling.backward_pass.first:
            filling.views[place].add_(gradient)
        else:
            filling.views[place].copy_(gradient)
        self._added(name, filling)

    def _added(self, name: str, filling: _Filling) -> None:
        filling.missing -= 1
        if filling.missing == 0:
            self._send(name, filling)
            self._done(name)

    def _open(self, name: str, filling: _Filling) -> None:
        unit = self._units[name]
        if self._views:
            filling.views = self._views[name]
        else:
            filling.buffer = self._take(unit.ranges.padded)
            filling.buffer[unit.spec.numel :].zero_()
            filling.views = unit.lasting_views(filling.buffer)
        if filling.backward_pass.first or filling.buffer is not None:
            for view in filling.views[1:] if filling.backward_pass.leading else []:
                view.zero_()

    def _take(self, size: int) -> Tensor:
        while (buffer := self.pool.take(size)) is None:
            self._receive()
        return buffer

    def _receive(self) -> None:
        ticket, buffer = self._sent.popleft()
        ticket.wait()
        self.pool.give_back(buffer)

    def _send(self, name: str, filling: _Filling) -> None:
        unit, first, last = self._units[name], filling.backward_pass.first, filling.backward_pass.last
        buffer, filling.buffer, filling.views = filling.buffer, None, []
        if self._degrees.ranks == 1 or (buffer is None and not last):
            return
        self._count_bytes(unit, last)

        def steps(workspace: Workspace) -> list[HopStep]:
            found = self._first_steps(unit, buffer, first, workspace) if buffer is not None else []
            found += self._last_steps(unit, workspace) if last else []
            whole = unit.gradient if buffer is None else buffer
            found[0] = found[0].first(lambda: self._sum_partial(unit, whole))
            return found

        tickets = self.in_flight.start(steps)
        if buffer is not None:
            # The first hop has it all; what goes on from there lies elsewhere.
            self._sent.append((tickets[0], buffer))
        if last:
            self._completing += tickets[-1:]

    def _sum_partial(self, unit: ShardedUnit, whole: Tensor) -> None:
        """Add up what each tensor-parallel rank has of the gradients of what they all hold."""
        part = whole[unit.spec.replicated : unit.spec.numel]
        if self.replica_groups.partial is not None and len(part):
            self.replica_groups.partial.all_reduce(part).wait()

    def _first_steps(self, unit: ShardedUnit, buffer: Tensor, first: bool, workspace: Workspace) -> list[HopStep]:
        """Sum one microbatch's gradients over the ranks that its sum is cut over."""
        (*steps, end), part = reduce_scatter(buffer, self._first_hops, self._wire, self._packing, workspace)
        return [*steps, end.then(lambda: unit.gradient.copy_(part) if first else unit.gradient.add_(part))]

    def _last_steps(self, unit: ShardedUnit, workspace: Workspace) -> list[HopStep]:
        """Sum the gradient shard over all other ranks, and gather back what several of them step with."""
        hops, owned = (*self._second_hops, *self._replica_hops), unit.owned_gradient
        if not hops:
            return []
        (*steps, end), part = reduce_scatter(unit.gradient, hops, self._wire, self._packing, workspace)
        whole = owned if self._wire == owned.dtype else workspace.take("whole", len(owned), self._wire)
        target = own_part(whole, self._replica_hops)
        steps.append(end.then(lambda: target.copy_(part)))
        steps += all_gather(whole, self._back_hops)
        if whole is not owned:
            steps[-1] = steps[-1].then(lambda: owned.copy_(whole))
        return steps

    def _count_bytes(self, unit: ShardedUnit, last: bool) -> None:
        padded, cut, size = unit.ranges.padded, self._degrees, self._wire.itemsize
        if cut.gradients > 1:
            self._count(reduce_traffic("gradients", self._first_hops, padded, size, self._packing))
        if last:
            shard, owned = padded // cut.gradients, padded // cut.optimizer
            self._count(reduce_traffic("gradients", self._second_hops, shard, size, self._packing))
            self._count(reduce_traffic("replicas", self._replica_hops, owned, size, self._packing))
            self._count(gather_traffic("replicas", self._replica_hops, owned, size, None))
