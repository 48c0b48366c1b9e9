"""Gathers and reductions whose values can be sent packed, as lists of steps, one for each hop."""

import math
from collections.abc import Sequence

import torch
from llmtrain_kernels.quantize.op import dequantize, dequantize_sum, quantize
from torch import Tensor

from llmtrain.comm.workspace import Workspace
from llmtrain.sharding.collectives import HopStep, Packing, all_gather, own_shard
from llmtrain.sharding.hops import Hop


def gather_parts(
    buffer: Tensor, part: Tensor, hops: tuple[Hop, ...], packing: Packing | None, workspace: Workspace,
    packed: bool = False,
) -> list[HopStep]:  # fmt: skip
    """Fill `buffer`, `[n]`, from every rank's `part`, `[n / ranks]` of the same dtype, which is sent packed if there is
    a `packing`. See all_gather_packed."""
    if packing is not None:
        return all_gather_packed(buffer, part, hops, packing, workspace, packed=packed)
    own = own_shard(buffer, hops)
    first, *rest = all_gather(buffer, hops)
    return [first.first(lambda: own.copy_(part)), *rest]


def all_gather_packed(
    gathered: Tensor, part: Tensor, hops: Sequence[Hop], packing: Packing, workspace: Workspace, packed: bool = False
) -> list[HopStep]:
    """Fill `gathered`, `[n]` of any float dtype, from every rank's `part`, `[n / ranks]`, which is sent packed. This
    rank's own part is rounded as well (ZeRO++, section 3.1).

    workspace: buffers for this gather alone. packed: whether `part` is packed already, uint8 `[row_bytes]`.
    """
    rows = math.prod(hop.radix for hop in hops)
    buffer = workspace.take("packed", rows * packing.row_bytes(gathered.numel() // rows), torch.uint8)
    own = own_shard(buffer, hops)
    steps = all_gather(buffer, hops)
    steps[0] = steps[0].first(lambda: own.copy_(part) if packed else packing.pack(part, own))
    steps[-1] = steps[-1].then(
        lambda: dequantize(buffer.view(rows, -1), packing.bits, packing.block, gathered.view(rows, -1))
    )
    return steps


def reduce_scatter(
    values: Tensor, hops: Sequence[Hop], wire: torch.dtype | None, packing: Packing | None, workspace: Workspace
) -> tuple[list[HopStep], Tensor]:
    """Sum `values`, `[n]` of any float dtype, over the hops' ranks. Return the steps, and this rank's part of the sum,
    fp32 `[n / ranks]` in `workspace`.

    The fastest hop goes first, with the largest parts. Every hop adds in fp32. Values are sent as `wire`, None for
    the dtype that each hop's have, or packed (ZeRO++, section 3.3, with a hop for each level).
    """
    steps = []
    for hop in hops:
        total = workspace.take(f"sum over {hop.span}", values.numel() // hop.radix, torch.float32)
        steps.append(_exchange(values, hop, wire or values.dtype, packing, total))
        values = total
    return steps, values


def _exchange(values: Tensor, hop: Hop, wire: torch.dtype, packing: Packing | None, total: Tensor) -> HopStep:
    if packing is not None:
        return HopStep(hop.stream, lambda: _exchange_packed(values, hop, packing, total))
    return HopStep(hop.stream, lambda: hop.collectives.reduce_scatter(values, total, wire).wait())


def _exchange_packed(values: Tensor, hop: Hop, packing: Packing, total: Tensor) -> None:
    row = packing.row_bytes(total.numel())
    sent = hop.workspace.take("sent", hop.radix * row, torch.uint8).view(hop.radix, row)
    received = hop.workspace.take("received", hop.radix * row, torch.uint8).view(hop.radix, row)
    others = slice(hop.position), slice(hop.position + 1, None)
    for rows in others:
        quantize(values.view(hop.radix, -1)[rows], packing.bits, packing.block, sent[rows])
    hop.collectives.all_to_all(received, sent).wait()
    # This rank's own part is not sent, and so not rounded.
    total.copy_(own_shard(values, (hop,)))
    for rows in others:
        dequantize_sum(received[rows], packing.bits, packing.block, total, accumulate=True)
