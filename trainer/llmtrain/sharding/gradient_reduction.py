"""The reduction of one unit's gradients over the ranks that share it, hop by hop.

Every microbatch reduces the unsharded gradients to the gradient shard (the first hops). The last microbatch then
reduces the gradient shard to the optimizer shard (the second hops); MiCS, section 3.4, all-reduces there, with twice
the bytes. If several ranks hold the same optimizer shard, they gather the sum back.
"""

from typing import Protocol

import torch
from llmtrain_kernels.adamw.step import AdamWStep
from llmtrain_kernels.squared_sum.op import squared_sum
from torch import Tensor

from llmtrain.comm.waits import Ticket
from llmtrain.comm.workspace import Workspace
from llmtrain.plan.program.instructions import Reduce
from llmtrain.plan.traffic import Traffic, gather_traffic, reduce_traffic
from llmtrain.sharding.collectives import HopStep, Packing, all_gather, own_shard
from llmtrain.sharding.gradient_sums import GradientSum
from llmtrain.sharding.optimizer_shard import ElementRange
from llmtrain.sharding.packed_collectives import reduce_scatter
from llmtrain.sharding.unit import ShardedUnit


class UnitGradient(Protocol):
    """The gradient of one unit, wherever it rests. sum: of backward passes."""

    sum: GradientSum

    def squares(self, within: ElementRange) -> Tensor:
        """Return the squared norm of a range of the unit that this rank steps, fp64 scalar."""

    def step(self, numbers: AdamWStep) -> Ticket | None:
        """Step the unit. See ShardedUnit."""


class Reduction(UnitGradient, Protocol):
    """A unit's gradient that is reduced over ranks, or to where it rests."""

    def steps(self, values: Tensor, issue: Reduce, workspace: Workspace) -> list[HopStep]:
        """Return the steps of a reduction. values: `[padded]`, gradients of the full unit: of one microbatch, in the
        dtype of the weights, or of a run of microbatches, in a buffer; or the unit's own gradient."""

    def traffic(self, issue: Reduce, dtype: torch.dtype) -> list[Traffic]:
        """Return the collectives of the steps. dtype: of the values."""


class ResidentGradient:
    """A gradient in the memory of the device. See UnitGradient."""

    def __init__(self, unit: ShardedUnit, gradient_sum: GradientSum) -> None:
        self._unit, self.sum = unit, gradient_sum

    def squares(self, within: ElementRange) -> Tensor:
        """See UnitGradient."""
        (start, end), offset = within, self._unit.ranges.optimizer[0]
        return squared_sum(self._unit.owned_gradient[start - offset : end - offset], start)

    def step(self, numbers: AdamWStep) -> Ticket | None:
        """See UnitGradient."""
        return self._unit.step(numbers)


class LastReduction(ResidentGradient):
    """Reduces a gradient that is not sharded once, after the last microbatch. Values are sent as the unit's `wire`,
    or packed. See Reduction."""

    def __init__(self, unit: ShardedUnit, gradient_sum: GradientSum, packing: Packing | None) -> None:
        super().__init__(unit, gradient_sum)
        self._packing, self._wire = packing, unit.wire

    def steps(self, values: Tensor, issue: Reduce, workspace: Workspace) -> list[HopStep]:
        """See Reduction."""
        return self._last_steps(workspace) if issue.last else []

    def traffic(self, issue: Reduce, dtype: torch.dtype) -> list[Traffic]:
        """See Reduction."""
        return last_traffic(self._unit, self._packing) if issue.last else []

    def _last_steps(self, workspace: Workspace) -> list[HopStep]:
        unit, owned = self._unit, self._unit.owned_gradient
        if not unit.hops.placement.hops_after_sum:
            return []
        target = (
            owned if self._wire in (None, owned.dtype) else workspace.take("owned gradient", len(owned), self._wire)
        )
        steps = reduce_to_optimizer_shard(unit, unit.gradient, target, self._packing, workspace)
        if target is not owned:
            steps[-1] = steps[-1].then(lambda: owned.copy_(target))
        return steps


class ShardedReduction(LastReduction):
    """Sums the gradients of every microbatch into the gradient shard. See Reduction."""

    def __init__(self, unit: ShardedUnit, gradient_sum: GradientSum, packing: Packing | None) -> None:
        super().__init__(unit, gradient_sum, packing)
        self._first_hops = unit.hops.reduce(1, unit.degrees.gradients)

    def steps(self, values: Tensor, issue: Reduce, workspace: Workspace) -> list[HopStep]:
        """See Reduction."""
        return [*self._first_steps(values, issue.first, workspace), *super().steps(values, issue, workspace)]

    def traffic(self, issue: Reduce, dtype: torch.dtype) -> list[Traffic]:
        """See Reduction."""
        return traffic(self._unit, self._packing, issue, dtype)

    def _first_steps(self, buffer: Tensor, first: bool, workspace: Workspace) -> list[HopStep]:
        """first: whether the sum overwrites the shard."""
        shard = self._unit.gradient
        (*steps, end), part = reduce_scatter(buffer, self._first_hops, self._wire, self._packing, workspace)
        return [*steps, end.then(lambda: shard.copy_(part) if first else shard.add_(part))]


def reduce_to_optimizer_shard(
    unit: ShardedUnit, shard: Tensor, target: Tensor, packing: Packing | None, workspace: Workspace
) -> list[HopStep]:
    """Return the steps that sum a gradient shard over all other ranks.

    shard: `[n]`, fp32 or in the dtype of the weights. target: `[owned]`, receives the part that this rank steps, in the
    dtype that is sent.
    """
    degrees = unit.degrees
    replica_hops = unit.hops.reduce(degrees.optimizer, degrees.ranks)
    hops = (*unit.hops.reduce(degrees.gradients, degrees.optimizer), *replica_hops)
    (*steps, end), part = reduce_scatter(shard, hops, target.dtype, packing, workspace)
    own = own_shard(target, replica_hops)
    return [
        *steps,
        end.then(lambda: own.copy_(part)),
        *all_gather(target, unit.hops.gather(degrees.optimizer, degrees.ranks)),
    ]


def traffic(unit: ShardedUnit, packing: Packing | None, issue: Reduce, dtype: torch.dtype) -> list[Traffic]:
    """Return the collectives that sum one microbatch's gradients, of `dtype`, into the gradient shards, and after the
    last one their sum."""
    hops, sizes = unit.hops.reduce(1, unit.degrees.gradients), ((unit.wire or dtype).itemsize, _sum_bytes(unit))
    first = reduce_traffic("gradients", hops, unit.ranges.padded, sizes, packing)
    return first + (last_traffic(unit, packing) if issue.last else [])


def last_traffic(unit: ShardedUnit, packing: Packing | None) -> list[Traffic]:
    """Return the collectives that sum the gradient shard over all other ranks into the optimizer shard."""
    padded, degrees, size = unit.ranges.padded, unit.degrees, _sum_bytes(unit)
    owned, replica_hops = padded // degrees.optimizer, unit.hops.reduce(degrees.optimizer, degrees.ranks)
    second_hops = unit.hops.reduce(degrees.gradients, degrees.optimizer)
    return [
        *reduce_traffic("gradients", second_hops, padded // degrees.gradients, (size, size), packing),
        *reduce_traffic("replicas", replica_hops, owned, (size, size), packing),
        *gather_traffic("replicas", replica_hops, owned, size, None),
    ]


def _sum_bytes(unit: ShardedUnit) -> int:
    """Bytes of an element of a sum that is sent."""
    return (unit.wire or torch.float32).itemsize
