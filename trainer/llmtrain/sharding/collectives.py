"""Gathers as lists of steps, one for each hop: hierarchical and in place. Quantized formats."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain_kernels.quantize.op import dequantize, quantize
from torch import Tensor

from llmtrain.comm.stream import Job, Stream
from llmtrain.plan.packed_format import PackedFormat
from llmtrain.sharding.hops import Hop


@dataclass(frozen=True)
class HopStep:
    """A step of a gather or a reduction. The job runs on `stream`, without gradients."""

    stream: Stream
    job: Job

    def then(self, job: Job) -> "HopStep":
        """Return this step with `job` after it."""
        return HopStep(self.stream, lambda: (self.job(), job()))

    def first(self, job: Job) -> "HopStep":
        """Return this step with `job` before it."""
        return HopStep(self.stream, lambda: (job(), self.job()))


@dataclass(frozen=True)
class Packing(PackedFormat):
    """A quantized format with the kernels that pack and unpack."""

    def pack(self, values: Tensor, out: Tensor) -> None:
        """Pack one-dimensional `values` into `out`, uint8 `[row_bytes]`."""
        quantize(values.view(1, -1), self.bits, self.block, out.view(1, -1))

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Unpack uint8 `[row_bytes]` into one-dimensional `out`."""
        dequantize(packed.view(1, -1), self.bits, self.block, out.view(1, -1))


def own_shard(gathered: Tensor, hops: Sequence[Hop]) -> Tensor:
    """Return this rank's part of `gathered`, one-dimensional and of any dtype. hops: the fastest, which is the most
    significant, first."""
    for hop in hops:
        size = gathered.numel() // hop.radix
        gathered = gathered[hop.position * size : (hop.position + 1) * size]
    return gathered


def all_gather(gathered: Tensor, hops: Sequence[Hop]) -> list[HopStep]:
    """Return the steps that fill `gathered`, one-dimensional and of any dtype, which has this rank's part already.

    The slowest hop goes first, with the smallest parts. All parts are received in place (MiCS, section 3.3, without its
    rearranging copy).
    """
    return [_gather_over(hops[depth], own_shard(gathered, hops[:depth])) for depth in reversed(range(len(hops)))]


def _gather_over(hop: Hop, region: Tensor) -> HopStep:
    return HopStep(hop.stream, lambda: hop.collectives.all_gather(region).wait())
