"""Gathers and reductions as lists of steps, one for each hop: hierarchical, in place, plain or quantized."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from llmtrain_kernels.quantize.op import dequantize, dequantize_sum, quantize
from torch import Tensor

from llmtrain.comm.stream import Job, Stream
from llmtrain.comm.workspace import Workspace
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


def own_part(whole: Tensor, hops: Sequence[Hop]) -> Tensor:
    """Return this rank's part of `whole`, one-dimensional. hops: the fastest, which is the most significant, first."""
    for hop in hops:
        size = whole.numel() // hop.radix
        whole = whole[hop.place * size : (hop.place + 1) * size]
    return whole


def all_gather(whole: Tensor, hops: Sequence[Hop]) -> list[HopStep]:
    """Fill `whole`, one-dimensional, which has this rank's part already.

    The slowest hop goes first, with the smallest parts. All parts are received in place (MiCS, section 3.3, without its
    rearranging copy).
    """
    return [_gather_over(hops[depth], own_part(whole, hops[:depth])) for depth in reversed(range(len(hops)))]


def all_gather_packed(
    whole: Tensor, part: Tensor, hops: Sequence[Hop], packing: Packing, workspace: Workspace, packed: bool = False
) -> list[HopStep]:
    """Fill `whole` from every rank's `part`, which is sent packed. This rank's own part is rounded as well.

    workspace: buffers for this gather alone. packed: whether `part` is packed already.
    """
    rows = math.prod(hop.radix for hop in hops)
    buffer = workspace.take("packed", rows * packing.row_bytes(whole.numel() // rows), torch.uint8)
    own = own_part(buffer, hops)
    steps = all_gather(buffer, hops)
    steps[0] = steps[0].first(lambda: own.copy_(part) if packed else packing.pack(part, own))
    steps[-1] = steps[-1].then(
        lambda: dequantize(buffer.view(rows, -1), packing.bits, packing.block, whole.view(rows, -1))
    )
    return steps


def reduce_scatter(
    values: Tensor, hops: Sequence[Hop], wire: torch.dtype, packing: Packing | None, workspace: Workspace
) -> tuple[list[HopStep], Tensor]:
    """Sum `values` over the hops' ranks. Return the steps, and this rank's part of the sum, fp32 and in `workspace`.

    The fastest hop goes first, with the largest parts. Every hop adds in fp32. Values are sent as `wire`, or packed
    (ZeRO++, section 3.3, with a hop for each level).
    """
    steps = []
    for hop in hops:
        total = workspace.take(f"sum over {hop.span}", values.numel() // hop.radix, torch.float32)
        steps.append(_exchange(values, hop, wire, packing, total))
        values = total
    return steps, values


def _gather_over(hop: Hop, region: Tensor) -> HopStep:
    return HopStep(hop.stream, lambda: hop.collectives.all_gather(region).wait())


def _exchange(values: Tensor, hop: Hop, wire: torch.dtype, packing: Packing | None, total: Tensor) -> HopStep:
    if packing is not None:
        return HopStep(hop.stream, lambda: _exchange_packed(values, hop, packing, total))
    return HopStep(hop.stream, lambda: hop.collectives.reduce_scatter(values, total, wire).wait())


def _exchange_packed(values: Tensor, hop: Hop, packing: Packing, total: Tensor) -> None:
    row = packing.row_bytes(total.numel())
    sent = hop.workspace.take("sent", hop.radix * row, torch.uint8).view(hop.radix, row)
    received = hop.workspace.take("received", hop.radix * row, torch.uint8).view(hop.radix, row)
    others = slice(hop.place), slice(hop.place + 1, None)
    for rows in others:
        quantize(values.view(hop.radix, -1)[rows], packing.bits, packing.block, sent[rows])
    hop.collectives.all_to_all(received, sent).wait()
    # This rank's own part is not sent, and so not rounded.
    total.copy_(own_part(values, (hop,)))
    for rows in others:
        dequantize_sum(received[rows], packing.bits, packing.block, total, accumulate=True)
