"""Sources of a unit's gathered weights: all ranks' shards, plain, packed, or in shared memory."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from llmtrain.comm.collectives import SharedParts
from llmtrain.comm.workspace import Workspace
from llmtrain.plan.traffic import Traffic, gather_traffic
from llmtrain.sharding.collectives import HopStep, Packing
from llmtrain.sharding.hops import Hop, Hops
from llmtrain.sharding.packed_collectives import gather_parts
from llmtrain.sharding.unit import ShardedUnit


class WeightSource(Protocol):
    """Fills a buffer with a unit's weights."""

    def steps(self, buffer: Tensor, workspace: Workspace) -> list[HopStep]:
        """Return the steps that fill `buffer`, `[padded]` of the compute dtype. workspace: for this gather alone."""

    def traffic(self) -> list[Traffic]:
        """Return the collectives of the steps."""


class ShardGather:
    """Gathers the weight shards of all ranks, unpacked or packed."""

    def __init__(self, unit: ShardedUnit, packing: Packing | None) -> None:
        self._unit, self._packing = unit, packing
        self._hops = unit.hops.gather(1, unit.degrees.weights)

    def steps(self, buffer: Tensor, workspace: Workspace) -> list[HopStep]:
        """See WeightSource."""
        return gather_parts(buffer, self._unit.weight, self._hops, self._packing, workspace)

    def traffic(self) -> list[Traffic]:
        """See WeightSource."""
        return shard_traffic(self._unit, self._hops, self._packing)


def shard_traffic(unit: ShardedUnit, hops: tuple[Hop, ...], packing: Packing | None) -> list[Traffic]:
    """Return the collectives of a gather of a unit's weight shards."""
    return gather_traffic("weights", hops, unit.ranges.padded, unit.weight.itemsize, packing)


class SharedShards:
    """Reads the weight shards of all ranks from memory that they share.

    Ranks exchange a message only before the first read after the shards were written. No rank writes its shard while
    others read it: a unit is stepped when its gradients are summed over the same ranks, each of which has computed with
    it before.
    """

    def __init__(self, unit: ShardedUnit, hop: Hop, shared: SharedParts, start: int) -> None:
        """shared: memory of the hop's ranks, in which this unit's shards begin at byte `start`; this rank's is the
        unit's weight from now on."""
        end = start + unit.weight.nbytes
        self._unit, self._hop, self._sync = unit, hop, shared.sync
        self._shards = [part[start:end].view(unit.weight.dtype) for part in shared.parts]
        self._written = True
        unit.move_weight(self._shards[hop.collectives.rank])

    def wrote(self) -> None:
        """Report that all ranks have written their shards."""
        self._written = True

    def steps(self, buffer: Tensor, workspace: Workspace) -> list[HopStep]:
        """See WeightSource."""
        parts, written = buffer.chunk(self._hop.radix), self._written
        self._written = False

        def read() -> None:
            if written:
                self._sync()
            for position, shard in zip(self._hop.collectives.order, self._shards, strict=True):
                parts[position].copy_(shard)

        return [HopStep(self._hop.stream, read)]

    def traffic(self) -> list[Traffic]:
        """See WeightSource."""
        return shard_traffic(self._unit, (self._hop,), None)


def share_shards(units: Iterable[ShardedUnit]) -> dict[str, SharedShards]:
    """Move weight shards that one hop inside a machine gathers to shared memory; return them by unit. Collective."""
    found: dict[str, SharedShards] = {}
    by_hops: dict[Hops, list[ShardedUnit]] = {}
    for unit in units:
        by_hops.setdefault(unit.hops, []).append(unit)
    for hops, sharing in by_hops.items():
        gather = hops.gather(1, hops.placement.degrees.weights)
        if len(gather) != 1:
            continue
        shared, start = gather[0].collectives.share(sum(unit.weight.nbytes for unit in sharing)), 0
        if shared is None:
            continue
        for unit in sharing:
            found[unit.spec.name] = SharedShards(unit, gather[0], shared, start)
            start += unit.weight.nbytes
    return found
