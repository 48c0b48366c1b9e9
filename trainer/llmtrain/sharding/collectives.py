"""Gathers and reductions over hops: in place, hierarchical, quantized. All run on a lane, without gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from llmtrain_kernels.quantize import dequantize, dequantize_sum, packed_bytes, quantize
from torch import Tensor

from llmtrain.sharding.hops import Hop


@dataclass
class Scratch:
    """Buffers that a lane's jobs use one after another; they grow in the first step and then stay."""

    device: torch.device
    _buffers: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the buffer `name` as `[numel]` of `dtype`, with whatever it holds."""
        nbytes = numel * dtype.itemsize
        held = self._buffers.get(name)
        if held is None or held.numel() < nbytes:
            held = self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return held[:nbytes].view(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.numel() for buffer in self._buffers.values())


@dataclass(frozen=True)
class Packing:
    """How numbers are packed into fewer bits: payload and scales of a shard lie in one buffer (ZeRO++, section 3)."""

    bits: int
    block: int

    def row_bytes(self, numel: int) -> int:
        """Bytes of `numel` packed elements."""
        return packed_bytes(numel, self.bits, self.block)

    def pack(self, values: Tensor, out: Tensor) -> None:
        """Pack one-dimensional `values` into `out`, uint8 `[row_bytes]`."""
        quantize(values.view(1, -1), self.bits, self.block, out.view(1, -1))


def own_part(whole: Tensor, hops: Sequence[Hop]) -> Tensor:
    """Return this rank's part of `whole`, which the hops' ranks share; hops from the fastest, the most significant."""
    for hop in hops:
        size = whole.numel() // hop.radix
        whole = whole[hop.place * size : (hop.place + 1) * size]
    return whole


def all_gather(whole: Tensor, hops: Sequence[Hop]) -> None:
    """Fill `whole`, one-dimensional, of which this rank's part is there already.

    The slowest hop goes first, with as little as possible; each lands where it belongs (MiCS, section 3.3, without
    the rearranging copy).
    """
    regions = [own_part(whole, hops[:depth]) for depth in range(len(hops) + 1)]
    for hop, region, part in reversed(list(zip(hops, regions, regions[1:], strict=False))):
        if hop.order == tuple(range(hop.radix)):
            dist.all_gather_into_tensor(region, part, group=hop.group)
        else:
            parts = region.chunk(hop.radix)
            dist.all_gather([parts[place] for place in hop.order], part, group=hop.group)


def all_gather_packed(
    whole: Tensor, part: Tensor, hops: Sequence[Hop], packing: Packing, scratch: Scratch, packed: bool = False
) -> None:
    """Fill `whole` from every rank's `part`, which travels packed; one's own part is rounded as all others are.

    packed: whether `part` is packed already.
    """
    rows = _ranks(hops)
    buffer = scratch.take("packed", rows * packing.row_bytes(whole.numel() // rows), torch.uint8)
    own = own_part(buffer, hops)
    if packed:
        own.copy_(part)
    else:
        packing.pack(part, own)
    all_gather(buffer, hops)
    dequantize(buffer.view(rows, -1), packing.bits, packing.block, whole.view(rows, -1))


def reduce_scatter(
    values: Tensor, hops: Sequence[Hop], wire: torch.dtype, packing: Packing | None, scratch: Scratch
) -> Tensor:
    """Return this rank's part of the sum of `values` over the hops' ranks, fp32, in memory that the next job reuses.

    The fastest hop goes first, with the most. Every hop is an all-to-all, and its sum is made in fp32, in the ranks'
    order. Values travel as `wire`, or packed (ZeRO++, section 3.3, with a hop for each level).
    """
    for depth, hop in enumerate(hops):
        numel = values.numel() // hop.radix
        total = scratch.take(f"sum{depth % 2}", numel, torch.float32)
        if packing is not None:
            _exchange_packed(values, hop, packing, scratch, total)
        else:
            sent = values if values.dtype == wire else scratch.take("sent", values.numel(), wire).copy_(values)
            received = scratch.take("received", values.numel(), wire)
            dist.all_to_all_single(received, sent, group=hop.group)
            torch.sum(received.view(hop.radix, numel), 0, dtype=torch.float32, out=total)
        values = total
    return values


def _exchange_packed(values: Tensor, hop: Hop, packing: Packing, scratch: Scratch, total: Tensor) -> None:
    row = packing.row_bytes(total.numel())
    sent = scratch.take("sent", hop.radix * row, torch.uint8).view(hop.radix, row)
    received = scratch.take("received", hop.radix * row, torch.uint8).view(hop.radix, row)
    quantize(values.view(hop.radix, -1), packing.bits, packing.block, sent)
    dist.all_to_all_single(received, sent, group=hop.group)
    dequantize_sum(received, packing.bits, packing.block, total)


def _ranks(hops: Sequence[Hop]) -> int:
    ranks = 1
    for hop in hops:
        ranks *= hop.radix
    return ranks
