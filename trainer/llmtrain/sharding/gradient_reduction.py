"""The reduction of one unit's gradients over the ranks that share it, hop by hop.

Every microbatch reduces the whole gradients to the gradient shard (the first hops). The last microbatch then reduces
the gradient shard to the optimizer shard (the second hops); MiCS, section 3.4, all-reduces there, with twice the bytes.
If several ranks hold the same optimizer shard, they gather the sum back.
"""

from torch import Tensor

from llmtrain.comm.workspace import Workspace
from llmtrain.plan.traffic import Traffic, gather_traffic, reduce_traffic
from llmtrain.sharding.collectives import HopStep, Packing, all_gather, own_part, reduce_scatter
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
        """Return the steps that sum one microbatch's gradients into the gradient shards.

        buffer: of the whole unit, in the dtype of the weights. first: whether the sum overwrites the shard.
        """
        shard = self._unit.gradient
        (*steps, end), part = reduce_scatter(buffer, self._first_hops, self._wire, self._packing, workspace)
        return [*steps, end.then(lambda: shard.copy_(part) if first else shard.add_(part))]

    def last_steps(self, workspace: Workspace) -> list[HopStep]:
        """Return the steps that sum the gradient shard over all other ranks into the optimizer shard."""
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
        """Return the collectives of `first_steps`."""
        padded, size = self._unit.ranges.padded, self._wire.itemsize
        return reduce_traffic("gradients", self._first_hops, padded, size, self._packing)

    def last_traffic(self) -> list[Traffic]:
        """Return the collectives of `last_steps`."""
        padded, cut, size = self._unit.ranges.padded, self._unit.degrees, self._wire.itemsize
        owned = padded // cut.optimizer
        return [
            *reduce_traffic("gradients", self._second_hops, padded // cut.gradients, size, self._packing),
            *reduce_traffic("replicas", self._replica_hops, owned, size, self._packing),
            *gather_traffic("replicas", self._replica_hops, owned, size, None),
        ]
