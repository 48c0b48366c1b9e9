"""Sums over ranks and gathers; small ones take a single round of messages where gloo would take many."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

# Its name since torch 2.13, which warns of the old one.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

ONE_ROUND = 2**20
"""Bytes up to which a rank sends its whole tensor to each of the others. gloo's ring sends less, in many messages that
wait for each other: two to four times as long for small tensors."""


def in_one_round(x: Tensor, ranks: int) -> bool:
    """Return whether so many ranks share their `x` in one round, where each sends it to all others."""
    return x.device.type == "cpu" and x.nbytes * (ranks - 1) <= ONE_ROUND


def begin_sum(x: Tensor, group: dist.ProcessGroup | None = None) -> tuple[dist.Work | None, Callable[[], Tensor]]:
    """Begin to sum contiguous `x` over the ranks of `group`, None for all ranks.

    Returns what to wait for, and what then finishes: it returns `x`, which has the sum, to the bit the same on every
    rank.
    """
    ranks = dist.get_world_size(group)
    if not in_one_round(x, ranks):
        return dist.all_reduce(x, group=group, async_op=True), lambda: x
    # In the order of the ranks, whoever adds them up.
    parts = x.new_empty(ranks, *x.shape)
    return begin_gather(parts, x, group), lambda: torch.sum(parts, 0, out=x)


def begin_gather(parts: Tensor, x: Tensor, group: dist.ProcessGroup | None = None) -> dist.Work | None:
    """Begin to put every rank's contiguous `x` of `[*]` into `parts`, `[ranks, *]`; return what to wait for."""
    if not in_one_round(x, len(parts)):
        return _all_gather(parts.flatten(0, 1), x, group=group, async_op=True)
    return dist.all_to_all_single(parts, x.expand_as(parts).contiguous(), group=group, async_op=True)


def sum_over(x: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum contiguous `x` over the ranks of `group`, None for all ranks."""
    work, finish = begin_sum(x, group)
    if work is not None:
        work.wait()
    finish()
