"""TP-replicated parameters, updated without quantization.

Rounding depends on the other values of a block, which differ between tensor-parallel ranks. Quantized updates would
make the replicas differ.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from llmtrain.comm.device import to_device
from llmtrain.comm.stream import Job
from llmtrain.plan.traffic import Traffic
from llmtrain.sharding.collectives import HopStep
from llmtrain.sharding.hops import Hop
from llmtrain.sharding.unit import ShardedUnit


class ReplicatedParameters:
    """The TP-replicated parameters of one unit, in full on every rank, in the dtype of the weights."""

    def __init__(self, unit: ShardedUnit) -> None:
        self._unit = unit
        size = unit.spec.replicated_numel
        self._values = torch.zeros(size, dtype=unit.weight.dtype, device=unit.weight.device)

    def steps(self, hops: Sequence[Hop]) -> list[HopStep]:
        """Return the steps that update them, and the weight shard, from what ranks take, over `hops`."""
        found = [HopStep(hop.stream, partial(self._sum, hop)) for hop in hops]
        weight, start = self._unit.weight, self._unit.ranges.weights[0]
        found[-1] = found[-1].then(lambda: self.put(weight, start))
        return found

    def taking(self) -> Job:
        """Return what copies this rank's part of what a step has rounded, before packed weights overwrite it. The rest
        is zero, so that the sum over ranks has all parts."""
        unit, first, offset = self._unit, self._unit.spec.replicated_from, self._unit.ranges.optimizer[0]
        start, end = (min(max(bound, first), unit.spec.numel) for bound in unit.ranges.optimizer)
        # Offloaded weights are on the device now, and not when this runs.
        rounded = (unit.owned_weight if unit.at_rest is None else unit.at_rest)[start - offset : end - offset]

        def take() -> None:
            self._values.zero_()
            self._values[start - first : end - first].copy_(to_device(rounded, self._values.device))

        return take

    def traffic(self, hops: Sequence[Hop]) -> list[Traffic]:
        """Return the collectives of `steps`."""
        size = self._values.nbytes
        sent = [(hop.tier, hop.collectives.all_reduce_bytes(size)) for hop in hops]
        return [Traffic("update", "all_reduce", tier, size, nbytes, False) for tier, nbytes in sent]

    def put(self, weights: Tensor, offset: int) -> None:
        """Write the parameters into `weights`, `[n]` of their dtype: a range of the unit that begins at element
        `offset`."""
        first = self._unit.spec.replicated_from
        start, end = max(first, offset), min(self._unit.spec.numel, offset + len(weights))
        if start < end:
            weights[start - offset : end - offset].copy_(self._values[start - first : end - first])

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self._values.nbytes

    def _sum(self, hop: Hop) -> None:
        hop.collectives.all_reduce(self._values).wait()
