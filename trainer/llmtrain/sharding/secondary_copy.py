"""A secondary copy as the source of a unit's gathered weights."""

import torch
from torch import Tensor

from llmtrain.comm.workspace import Workspace
from llmtrain.plan.traffic import Traffic, gather_traffic
from llmtrain.sharding.collectives import HopStep, Packing, own_shard
from llmtrain.sharding.packed_collectives import gather_parts
from llmtrain.sharding.unit import ShardedUnit


class SecondaryCopy:
    """A secondary copy of a unit's weights, sharded over fewer and nearer ranks (ZeRO++, section 3.2), packed or not.

    The first gather of a pass fills it.
    """

    def __init__(self, unit: ShardedUnit, packing: Packing | None) -> None:
        self._unit, self._packing = unit, packing
        self._hops = unit.hops.gather(1, unit.degrees.secondary)
        numel, like = unit.ranges.padded // unit.degrees.secondary, unit.weight
        if packing is None:
            self._copy = like.new_zeros(numel)
        else:
            self._copy = like.new_zeros(packing.row_bytes(numel), dtype=torch.uint8)

    def fill(self, buffer: Tensor) -> None:
        """Copy this rank's shard out of `buffer`: gathered weights, `[padded]` of the compute dtype."""
        part = own_shard(buffer, self._hops)
        if self._packing is None:
            self._copy.copy_(part)
        else:
            self._packing.pack(part, self._copy)

    def steps(self, buffer: Tensor, workspace: Workspace) -> list[HopStep]:
        """See WeightSource."""
        if not self._hops:
            # The copy is not sharded. Copy it on the stream of a hop, in parallel with the computation.
            return [HopStep(self._unit.hops.weights[0].stream, lambda: self._restore(buffer))]
        return gather_parts(buffer, self._copy, self._hops, self._packing, workspace, packed=self._packing is not None)

    def traffic(self) -> list[Traffic]:
        """See WeightSource."""
        unit = self._unit
        return gather_traffic("secondary", self._hops, unit.ranges.padded, unit.weight.itemsize, self._packing)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return self._copy.nbytes

    def _restore(self, buffer: Tensor) -> None:
        if self._packing is None:
            buffer.copy_(self._copy)
        else:
            self._packing.unpack(self._copy, buffer)
