"""Sources of a unit's gathered weights: all ranks' shards (plain, packed, or in shared memory) or a secondary copy."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from llmtrain.comm.collectives import SharedParts
from llmtrain.comm.workspace import Workspace
from llmtrain.plan.traffic import Traffic, gather_traffic
from llmtrain.sharding.collectives import HopStep, Packing, all_gather, all_gather_packed, own_part
from llmtrain.sharding.hops import Hop, Hops
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
        return _gathered(buffer, self._unit.weight, self._hops, self._packing, workspace)

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
        places, written = buffer.chunk(self._hop.radix), self._written
        self._written = False

        def read() -> None:
            if written:
                self._sync()
            for place, shard in zip(self._hop.collectives.order, self._shards, strict=True):
                places[place].copy_(shard)

        return [HopStep(self._hop.stream, read)]

    def traffic(self) -> list[Traffic]:
        """See WeightSource."""
        unit = self._unit
        return gather_traffic("weights", (self._hop,), unit.ranges.padded, unit.weight.itemsize, None)


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
        """Copy this rank's shard out of gathered weights."""
        part = own_part(buffer, self._hops)
        if self._packing is None:
            self._copy.copy_(part)
        else:
            self._packing.pack(part, self._copy)

    def steps(self, buffer: Tensor, workspace: Workspace) -> list[HopStep]:
        """See WeightSource."""
        if not self._hops:
            # Every rank holds the whole copy. Copy it on the stream of a hop, in parallel with the computation.
            return [HopStep(self._unit.hops.weights[0].stream, lambda: self._restore(buffer))]
        return _gathered(buffer, self._copy, self._hops, self._packing, workspace, packed=self._packing is not None)

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


def _gathered(
    buffer: Tensor, part: Tensor, hops: tuple[Hop, ...], packing: Packing | None, workspace: Workspace,
    packed: bool = False,
) -> list[HopStep]:  # fmt: skip
    if packing is not None:
        return all_gather_packed(buffer, part, hops, packing, workspace, packed=packed)
    own = own_part(buffer, hops)
    first, *rest = all_gather(buffer, hops)
    return [first.first(lambda: own.copy_(part)), *rest]
