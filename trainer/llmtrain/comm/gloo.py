"""Collectives over gloo, between CPUs."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain.comm.collectives import Collectives, Then, add_in_order
from llmtrain.comm.waits import AllOf, Ticket
from llmtrain.plan.collective_buffers import in_one_round


class GlooCollectives(Collectives):
    """Messages between all ranks where gloo's own algorithms copy more or wait longer. Sums are in the order of ranks,
    but for those of gloo's ring."""

    def all_gather(self, gathered: Tensor) -> Ticket:
        """See Collectives."""
        parts = self._parts(gathered)
        if not self.in_order:
            # A gather over the ranks of several nodes. In gloo's ring each part enters a node once, not once per rank.
            return _started(dist.all_gather(parts, parts[self.rank], group=self.group, async_op=True))
        return self._send_to_all(gathered, parts)

    def reduce_scatter(self, values: Tensor, total: Tensor, wire: torch.dtype) -> Ticket:
        """See Collectives. gloo's own reduce-scatter is an all-reduce, which sends twice as much."""
        received = self._buffer("received", values, values.numel(), wire)
        work = dist.all_to_all_single(received, self._as_wire(values, wire), group=self.group, async_op=True)
        return Then(work, lambda: add_in_order(received.chunk(self.size), total))

    def all_to_all(self, received: Tensor, sent: Tensor) -> Ticket:
        """See Collectives."""
        return _started(dist.all_to_all_single(received, sent, group=self.group, async_op=True))

    def all_reduce(self, x: Tensor) -> Ticket:
        """See Collectives."""
        if not self._in_one_round(x.nbytes):
            return _started(dist.all_reduce(x, group=self.group, async_op=True))
        gathered = self._buffer("gathered", x, self.size * x.numel(), x.dtype)
        parts = gathered.chunk(self.size)
        parts[self.rank].copy_(x.view(-1))
        return Then(self._send_to_all(gathered, parts), lambda: add_in_order(parts, x.view(-1)))

    def all_reduce_bytes(self, nbytes: int) -> int:
        """See Collectives."""
        return nbytes * (self.size - 1) if self._in_one_round(nbytes) else super().all_reduce_bytes(nbytes)

    def _in_one_round(self, nbytes: int) -> bool:
        return in_one_round(nbytes, self.size)

    def _send_to_all(self, gathered: Tensor, parts: Sequence[Tensor]) -> Ticket:
        """Send this rank's part of `gathered` to all others, and receive theirs. parts: views of `gathered`, by
        rank."""
        own = parts[self.rank]
        if self.size > 2 and self._in_one_round(own.nbytes):
            # Fewer threads have to wake than for messages of their own: with 4 ranks on 2 cores it takes a quarter.
            sent = self._buffer("sent", own, gathered.numel(), own.dtype)
            sent.view(self.size, -1).copy_(own)
            return _started(dist.all_to_all_single(gathered, sent, group=self.group, async_op=True))
        # gloo's all-gather copies through a buffer that it allocates each time.
        others = [rank for rank in range(self.size) if rank != self.rank]
        works = [dist.irecv(parts[other], group_src=other, group=self.group) for other in others]
        works += [dist.isend(own, group_dst=other, group=self.group) for other in others]
        return AllOf([_started(work) for work in works])


def _started(work: dist.Work | None) -> Ticket:
    """Return `work`, which torch types as None for ranks outside the group."""
    assert work is not None
    return work
