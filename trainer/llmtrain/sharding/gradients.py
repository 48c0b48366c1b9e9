"""The path of gradients from autograd to the optimizer shard: sums over microbatches, and hop by hop over ranks
while the backward pass continues."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from llmtrain_kernels.adamw.step import AdamWStep
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from llmtrain.comm.device import to_device
from llmtrain.comm.waits import Ticket
from llmtrain.comm.workspace import Workspace
from llmtrain.plan.program.instructions import Pass, Reduce
from llmtrain.plan.traffic import CountTraffic
from llmtrain.sharding.buffer_pool import views_overlap
from llmtrain.sharding.collectives import HopStep, Packing
from llmtrain.sharding.gradient_reduction import (
    LastReduction,
    Reduction,
    ResidentGradient,
    ShardedReduction,
    UnitGradient,
)
from llmtrain.sharding.gradient_sums import BufferedSum, Take, UnshardedSum
from llmtrain.sharding.in_flight import InFlight
from llmtrain.sharding.offloaded_gradients import OffloadedGradients, OffloadedReduction
from llmtrain.sharding.replica_groups import ReplicaGroups
from llmtrain.sharding.unit import ShardedUnit


@dataclass(frozen=True)
class GradientPolicy:
    """How gradients are reduced over ranks. packing: None for not packed. offloaded: where offloaded sums are held.
    sums_runs: whether buffers hold sums over runs of passes."""

    packing: Packing | None = None
    offloaded: OffloadedGradients | None = None
    sums_runs: bool = False


class GradientReducer:
    """Sums the gradients of units. complete: called with each unit whose gradients of a pass are complete; it calls
    `reduce` if `is_reduced`."""

    def __init__(
        self, units: Mapping[str, ShardedUnit], policy: GradientPolicy, replica_groups: ReplicaGroups,
        in_flight: InFlight, count: CountTraffic, complete: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._units, self.replica_groups, self._offloaded = units, replica_groups, policy.offloaded
        self._count, self._complete = count, complete
        some = next(iter(units.values()))
        self.pool = (some.gradient if policy.sums_runs else some.weight).new_zeros(0)
        self.in_flight = in_flight
        self._reductions = {
            name: _reduction(unit, policy, partial(self._new_buffer, name))
            for name, unit in units.items()
            if unit.degrees.ranks > 1 or unit.hops.placement.moves_gradients
        }
        # All units' gradients.
        self._gradients: dict[str, UnitGradient] = {
            name: self._reductions[name] if name in self._reductions else ResidentGradient(unit, UnshardedSum(unit))
            for name, unit in units.items()
        }
        # Called with each unit whose `owned_gradient` is complete before the last pass ends; units whose gradients
        # are summed once more at the end are left out.
        self.reduced: Callable[[str], None] = ignore
        self._sent: deque[tuple[Ticket, Tensor]] = deque()
        self._completing: list[Ticket] = []
        # What takes the gradients that autograd computes, in place of this object.
        self._hold: Take | None = None
        self._pass: Pass
        self._reduces: Mapping[str, Reduce] = {}
        self._unit_and_index = {
            parameter: (name, index)
            for name, unit in units.items()
            for index, parameter in enumerate(unit.parameters.tensors)
        }
        # Ranges of units, and the share of the squares of each that this rank adds to the norm.
        ranges = [
            (name, start, end, share / (unit.degrees.ranks // unit.degrees.optimizer))
            for name, unit in units.items()
            for start, end, share in replica_groups.shares(name, unit)
        ]
        self._counted = [(name, start, end) for name, start, end, _ in ranges]
        shares = torch.tensor([share for *_, share in ranges], dtype=torch.float64)
        self._shares = to_device(shares, some.weight.device)
        # By unit that has hooks. Python's garbage collector cannot follow references through autograd, so `close`
        # removes the hooks.
        self._hooks: dict[str, list[RemovableHandle]] = {}
        for name in units:
            self._listen(name, True)

    def allocate(self, elements: int) -> None:
        """Allocate the buffer pool of unsharded gradients: in the dtype of the weights, or of sums of gradients."""
        self.pool = self.pool.new_zeros(elements)

    def begin(self) -> None:
        """Begin an optimizer step."""
        if self._offloaded is not None:
            self._offloaded.store.begin()

    def step(self, unit: str, numbers: AdamWStep) -> Ticket | None:
        """Step a unit with its gradient, wherever it rests. See ShardedUnit."""
        return self._gradients[unit].step(numbers)

    def start(self, begun: Pass, passing: bool) -> None:
        """Begin a pass that computes gradients. passing: whether autograd runs it now and computes all gradients."""
        self._pass, self._reduces = begun, begun.reduces
        for backward_pass in begun.backward:
            reports = self._gradients[backward_pass.unit].sum.start(backward_pass, passing)
            self._listen(backward_pass.unit, reports)

    def check(self) -> None:
        """Raise RuntimeError if the pass has not computed all gradients."""
        missing = [one.unit for one in self._pass.backward if self._gradients[one.unit].sum.missing]
        if missing:
            raise RuntimeError(f"parameters without a gradient in {', '.join(missing)}")

    def is_reduced(self, name: str) -> bool:
        """Whether this pass reduces a unit's gradients."""
        return name in self._reduces

    def finish(self) -> None:
        """Wait, after the last microbatch, until the sums are complete."""
        while self._sent:
            self._sent.popleft()[0].wait()
        for ticket in self._completing:
            ticket.wait()
        self._completing.clear()
        for name, unit in self._units.items():
            if name not in self._reductions:
                self.replica_groups.sum_partial(unit, unit.gradient)
        self.replica_groups.finish(self._units)

    def reduce(self, issue: Reduce) -> None:
        """Start the reduction of a unit whose gradients of this pass are complete."""
        unit, reduction, reduced = self._units[issue.unit], self._reductions[issue.unit], self.reduced
        values = reduction.sum.take()
        self._count(reduction.traffic(issue, values.dtype))

        def steps(workspace: Workspace) -> list[HopStep]:
            found = reduction.steps(values, issue, workspace)
            found[0] = found[0].first(lambda: self.replica_groups.sum_partial(unit, values))
            if issue.last and issue.unit not in self.replica_groups.tied and len(unit.gradient):
                found[-1] = found[-1].then(lambda: reduced(issue.unit))
            return found

        tickets = self.in_flight.start(steps)
        if reduction.sum.buffered:
            # The first hop has read all of the buffer; the later ones work on other buffers.
            self._sent.append((tickets[0], values))
        if issue.last:
            self._completing += tickets[-1:]

    @contextmanager
    def redirected(self, names: Iterable[str], hold: Take) -> Iterator[None]:
        """Call `hold` with each gradient that autograd computes inside, of the units `names`, and add none."""
        for name in names:
            self._listen(name, True)
            self._gradients[name].sum.release()
        self._hold = hold
        yield
        self._hold = None

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add the gradient of a parameter."""
        self._add(*self._unit_and_index[parameter], gradient)

    def unit_of(self, parameter: nn.Parameter) -> str:
        """Return the name of a parameter's unit."""
        return self._unit_and_index[parameter][0]

    def close(self) -> None:
        """Remove the hooks and leave the process groups of replicas."""
        for name in self._units:
            self._listen(name, False)
        self.replica_groups.close()

    def squared_norm(self) -> Tensor:
        """Return this rank's share of the squared gradient norm, fp64 scalar.

        The sum over all ranks is the squared norm of the whole model. A rank adds fixed blocks of each unit in a fixed
        order.
        """
        squares = torch.stack([self._gradients[name].squares((start, end)) for name, start, end in self._counted])
        return (squares * self._shares).sum()

    def _listen(self, name: str, reports: bool) -> None:
        """Add or remove the hooks that report each gradient of a unit."""
        if reports and name not in self._hooks:
            parameters = self._units[name].parameters.tensors
            self._hooks[name] = [
                one.register_post_accumulate_grad_hook(partial(self._accumulated, name, index))
                for index, one in enumerate(parameters)
            ]
        elif not reports:
            for hook in self._hooks.pop(name, []):
                hook.remove()

    def _accumulated(self, name: str, index: int, parameter: nn.Parameter) -> None:
        if self._gradients[name].sum.by_autograd:
            self._added(name)
            return
        gradient, parameter.grad = parameter.grad, None
        # Without one, a layer has deferred it.
        if gradient is None:
            return
        if self._hold is None:
            self._add(name, index, gradient)
        else:
            self._hold(parameter, gradient)

    def _add(self, name: str, index: int, gradient: Tensor) -> None:
        self._gradients[name].sum.add(index, gradient)
        self._added(name)

    def _added(self, name: str) -> None:
        self._gradients[name].sum.missing -= 1
        if self._gradients[name].sum.missing == 0:
            self._gradients[name].sum.flush()
            self._complete(name)
            if self._is_final(name):
                self.reduced(name)

    def _is_final(self, name: str) -> bool:
        """Whether the gradients of this pass complete a unit's sum, without a reduction or a sum over replicas."""
        last = any(one.last for one in self._pass.backward if one.unit == name)
        groups = self.replica_groups
        return last and name not in self._reductions and name not in groups.tied and groups.partial is None

    def _new_buffer(self, name: str) -> Tensor:
        """Return the buffer of a unit's gradients that this pass opens, once no other reduction reads there."""
        offset = next(one.offset for one in self._pass.backward if one.unit == name)
        size = self._units[name].ranges.padded
        assert offset is not None
        buffer = self.pool[offset : offset + size]
        while any(views_overlap(buffer, sent) for _, sent in self._sent):
            self._sent.popleft()[0].wait()
        return buffer


def ignore(name: str) -> None:
    """Do nothing with a unit."""


def _reduction(unit: ShardedUnit, policy: GradientPolicy, new_buffer: Callable[[], Tensor]) -> Reduction:
    if unit.hops.placement.moves_gradients and policy.offloaded is not None:
        return OffloadedReduction(unit, BufferedSum(unit, new_buffer), policy.packing, policy.offloaded)
    if unit.degrees.gradients > 1:
        return ShardedReduction(unit, BufferedSum(unit, new_buffer), policy.packing)
    return LastReduction(unit, UnshardedSum(unit), policy.packing)
