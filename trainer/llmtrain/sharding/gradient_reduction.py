"""The reduction of one unit's gradients over the ranks that share it, hop by hop.

The first hops, from whole gradients to the gradient shard, go in every microbatch; the second ones, on to the optimizer
shard, at the last (MiCS, section 3.4, which all-reduces there: twice the bytes). Only where several ranks hold the same
optimizer shard is the sum gathered back among them.
"""

from torch import Tensor

from llmtrain.comm.workspace import Workspace
from llmtrain.sharding.collectives import HopStep, Packing, all_gather, own_part, reduce_scatter
from llmtrain.sharding.traffic import Traffic, gather_traffic, reduce_traffic
from llmtrain.sharding.unit import ShardedUnit


class GradientReduction:
    """How one unit's gradients travel: in the dtype of its weights, or packed."""

    def __init__(self, unit: ShardedUnit, packing: Packing | None) -> None:
        self._unit, self._packing, self._wire = unit, packing, unit.weight.dtype
        hops, cut = unit.hops, unit.degrees
        self._first_hops = hops.reduce(1, cut.gradients)
        self._second_hops = hops.reduce(cut.gradients, cut.optimizer)
        self._replica_hops = hops.reduce(cut.optimizer, cut.ranks)
        self._back_hops = hops.gather(cut.optimizer, cut.ranks)

    def first_steps(self, buffer: Tensor, first: bool, workspace: Workspace) -> list[HopStep]:
        """Return what sums one microbatch's gradients over the ranks that the gradient shards are cut over.

        buffer: of the whole unit, in the wire's dtype. first: whether the sum replaces what the shard holds.
        """
        shard = self._unit.gradient
        (*steps, end), part = reduce_scatter(buffer, self._first_hops, self._wire, self._packing, workspace)
        return [*steps, end.then(lambda: shard.copy_(part) if first else shard.add_(part))]

    def last_steps(self, workspace: Workspace) -> list[HopStep]:
        """Return what sums the gradient shard over all other ranks, and gathers back what several of them step."""
        hops, owned = (*self._second_hops, *self._replica_hops), self._unit.owned_gradient
        if not hops:
            return []
        (*steps, end), part = reduce_scatter(self._unit.gradient, hops, self._wire, self._packing, workspace)
        whole = owned if self._wire == owned.dtype else workspace.take("whole", len(owned), self._wire)
        target = own_part(whole, self._replica_hops)
        steps.append(end.then(lambda: target.copy_(part)))
        steps += all_gather(whole, self._back_hops)
        if whole is not owned:
            steps[-1] = steps[-1].then(lambda: owned.copy_(whole))
        return steps

    def first_traffic(self) -> list[Traffic]:
        """Return what `first_steps` puts on the links."""
        padded, size = self._unit.ranges.padded, self._wire.itemsize
        return reduce_traffic("gradients", self._first_hops, padded, size, self._packing)

    def last_traffic(self) -> list[Traffic]:
        """Return what `last_steps` puts on the links."""
        padded, cut, size = self._unit.ranges.padded, self._unit.degrees, self._wire.itemsize
        owned = padded // cut.optimizer
        return [
            *reduce_traffic("gradients", self._second_hops, padded // cut.gradients, size, self._packing),
            *reduce_traffic("replicas", self._replica_hops, owned, size, self._packing),
            *gather_traffic("replicas", self._replica_hops, owned, size, None),
        ]
