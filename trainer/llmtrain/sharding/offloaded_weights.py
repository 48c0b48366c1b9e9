"""Offloaded weight shards: in the host's memory, or in files (ZeRO-Infinity, section 5)."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from llmtrain.comm.stalls import StreamStalls
from llmtrain.comm.stream import Stream
from llmtrain.comm.workspace import Workspace
from llmtrain.plan.traffic import Traffic
from llmtrain.sharding.collectives import HopStep, Packing, all_gather, own_shard
from llmtrain.sharding.packed_collectives import all_gather_packed
from llmtrain.sharding.unit import ShardedUnit
from llmtrain.sharding.weight_gathers import shard_traffic


class WeightStore(Protocol):
    """Holds weight shards by unit. Each method of its streams' jobs runs on one stream alone."""

    def load(self, unit: str, into: Tensor) -> None:
        """Copy a unit's shard to `into`, `[n]` of the compute dtype on the device. Runs on the stream of reads."""

    def store(self, unit: str, values: Tensor) -> None:
        """Replace the first elements of a unit's shard by `values`, `[n]` of the compute dtype on the device. Runs on
        the stream of writes."""

    def read(self, unit: str, start: int, end: int) -> Tensor:
        """Return the elements `[start, end)` of a unit's shard, of the compute dtype, in the host's memory, once the
        writes are done."""

    def synchronize(self) -> None:
        """Wait until the device no longer reads or writes what the store holds."""


@dataclass(frozen=True)
class OffloadedWeights:
    """Where weight shards rest, and the streams on which they come and go. stalls: measures how long the GPU that
    computes waits for them, and for their gathers where several ranks have shards."""

    store: WeightStore
    reads: Stream
    writes: Stream
    stalls: StreamStalls


class OffloadedGather:
    """Brings a unit's shard to the device, and gathers the shards of all ranks where there are several."""

    def __init__(self, unit: ShardedUnit, packing: Packing | None, offloaded: OffloadedWeights) -> None:
        self._unit, self._packing, self._offloaded = unit, packing, offloaded
        self._hops = unit.hops.gather(1, unit.degrees.weights)

    def steps(self, buffer: Tensor, workspace: Workspace) -> list[HopStep]:
        """See WeightSource."""
        part, name = own_shard(buffer, self._hops), self._unit.spec.name
        found = [HopStep(self._offloaded.reads, lambda: self._offloaded.store.load(name, part))]
        if self._packing is not None and self._hops:
            return [*found, *all_gather_packed(buffer, part, self._hops, self._packing, workspace)]
        return [*found, *all_gather(buffer, self._hops)]

    def traffic(self) -> list[Traffic]:
        """See WeightSource."""
        return shard_traffic(self._unit, self._hops, self._packing)
