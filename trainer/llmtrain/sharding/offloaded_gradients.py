"""Offloaded sums of gradients, and their reduction."""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from llmtrain_kernels.adamw.step import AdamWStep
from torch import Tensor

from llmtrain.comm.stream import Job, Stream
from llmtrain.comm.waits import Ticket
from llmtrain.comm.workspace import Workspace
from llmtrain.plan.program.instructions import Reduce
from llmtrain.plan.traffic import Traffic
from llmtrain.sharding.collectives import HopStep, Packing
from llmtrain.sharding.gradient_reduction import reduce_to_optimizer_shard, traffic
from llmtrain.sharding.gradient_sums import GradientSum
from llmtrain.sharding.optimizer_shard import ElementRange, StepRange
from llmtrain.sharding.packed_collectives import reduce_scatter
from llmtrain.sharding.unit import ShardedUnit


class GradientStore(Protocol):
    """Holds fp32 sums of the gradient shards of units."""

    def begin(self) -> None:
        """Begin a step."""

    def add(self, unit: str, part: Tensor, first: bool, last: bool) -> None:
        """Add `part`, `[n]` of any float dtype on the device, to the sum of a unit's shard. first: replaces the sum.
        last: it is complete then."""

    def add_into(self, unit: str, part: Tensor, first: bool, total: Tensor) -> None:
        """Fill `total`, fp32 `[n]` on the device, with the sum and `part`. The sum itself is not kept."""

    def put(self, unit: str, values: Tensor) -> None:
        """Set what this rank steps, which is then complete, to `values`: `[n]` of any float dtype on the device."""

    def step(self, unit: str, step_range: StepRange) -> None:
        """Step the ranges of the unit that this rank steps, in order, with their gradients: fp32, in the host's memory,
        valid until the ticket of a range is waited for."""

    def squares(self, unit: str, within: ElementRange) -> float:
        """Return the squared norm of a range of the unit: all that this rank steps, or an end of it that TP-replicated
        parameters have."""


@dataclass(frozen=True)
class OffloadedGradients:
    """Where sums of gradients rest, and the stream on which gradients go there."""

    store: GradientStore
    stream: Stream


class OffloadedReduction:
    """Reduces the gradients of a unit into its offloaded sum. See Reduction."""

    def __init__(
        self, unit: ShardedUnit, gradient_sum: GradientSum, packing: Packing | None, offloaded: OffloadedGradients
    ) -> None:
        self.sum, self._wire = gradient_sum, unit.wire
        self._unit, self._packing, self._offloaded = unit, packing, offloaded
        self._hops = unit.hops.reduce(1, unit.degrees.gradients)

    def steps(self, values: Tensor, issue: Reduce, workspace: Workspace) -> list[HopStep]:
        """See Reduction."""
        unit, name, store = self._unit, self._unit.spec.name, self._offloaded.store
        steps, part = reduce_scatter(values, self._hops, self._wire, self._packing, workspace)
        if not (issue.last and unit.hops.placement.hops_after_sum):
            return [*steps, self._step(lambda: store.add(name, part, issue.first, issue.last))]
        (start, end), (first, last) = unit.ranges.gradients, unit.ranges.optimizer
        total = workspace.take("sum", end - start, torch.float32)
        owned = workspace.take("owned gradient", last - first, self._wire or torch.float32)
        steps.append(self._step(lambda: store.add_into(name, part, issue.first, total)))
        steps += reduce_to_optimizer_shard(unit, total, owned, self._packing, workspace)
        return [*steps, self._step(lambda: store.put(name, owned))]

    def traffic(self, issue: Reduce, dtype: torch.dtype) -> list[Traffic]:
        """See Reduction."""
        return traffic(self._unit, self._packing, issue, dtype)

    def squares(self, within: ElementRange) -> Tensor:
        """See UnitGradient."""
        found = self._offloaded.store.squares(self._unit.spec.name, within)
        return torch.full((), found, dtype=torch.float64, device=self._unit.weight.device)

    def step(self, numbers: AdamWStep) -> Ticket | None:
        """See UnitGradient."""
        return self._unit.step_by_ranges(numbers, partial(self._offloaded.store.step, self._unit.spec.name))

    def _step(self, job: Job) -> HopStep:
        return HopStep(self._offloaded.stream, job)
