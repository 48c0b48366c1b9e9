"""Collectives over NCCL, between GPUs. Written after the documentation of NCCL and torch.distributed; not yet run on a
GPU."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain.comm.collectives import ALL_GATHER, REDUCE_SCATTER, Collectives, Then
from llmtrain.comm.device import to_device
from llmtrain.comm.waits import Done, Ticket
from llmtrain.comm.workspace import Workspace


class NcclCollectives(Collectives):
    """One launch for each collective; the host never waits.

    A unit's parameters, or its packed values with their scales, are one flat buffer, so that a gather is one launch.
    With a workspace a collective runs on the current stream; without one it runs on NCCL's stream, in parallel with
    what the current stream computes until `wait`.
    """

    def __init__(
        self, group: dist.ProcessGroup, order: Sequence[int] | None = None, workspace: Workspace | None = None
    ) -> None:
        super().__init__(group, order, workspace)
        self._asynchronous = workspace is None
        # On the GPU from the first gather on: a copy to it would make the host wait.
        self._rank_at: Tensor | None = None

    def all_gather(self, gathered: Tensor) -> Ticket:
        """See Collectives."""
        own = gathered.chunk(self.size)[self.position]
        if self.in_order:
            return self._started(ALL_GATHER(gathered, own, group=self.group, async_op=self._asynchronous))
        # NCCL gathers in the order of ranks. One kernel then puts all parts in place; dist.all_gather copies each one.
        received = self._buffer("gathered", gathered, gathered.numel(), gathered.dtype)
        work = ALL_GATHER(received, own, group=self.group, async_op=self._asynchronous)
        return Then(work, lambda: self._put_in_place(received.view(self.size, -1), gathered.view(self.size, -1)))

    def reduce_scatter(self, values: Tensor, total: Tensor, wire: torch.dtype) -> Ticket:
        """See Collectives.

        NCCL's reduce-scatter rounds to the wire's dtype after every addition, so that it serves for fp32 alone; others
        are an all-to-all, one launch as well, and a sum in fp32.
        """
        if values.dtype == wire == total.dtype == torch.float32:
            return self._started(REDUCE_SCATTER(total, values, group=self.group, async_op=self._asynchronous))
        received = self._buffer("received", values, values.numel(), wire)
        sent = self._as_wire(values, wire)
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=self._asynchronous)
        # torch.sum adds in fp32, whatever the dtypes are.
        return Then(work, lambda: torch.sum(received.view(self.size, -1), 0, dtype=total.dtype, out=total))

    def all_to_all(self, received: Tensor, sent: Tensor) -> Ticket:
        """See Collectives."""
        return self._started(dist.all_to_all_single(received, sent, group=self.group, async_op=self._asynchronous))

    def all_reduce(self, x: Tensor) -> Ticket:
        """See Collectives."""
        return self._started(dist.all_reduce(x, group=self.group, async_op=self._asynchronous))

    def _put_in_place(self, received: Tensor, gathered: Tensor) -> None:
        """Copy row k of `received` to row `order[k]` of `gathered`."""
        if self._rank_at is None:
            ranks = sorted(range(self.size), key=self.order.__getitem__)
            self._rank_at = to_device(torch.tensor(ranks), gathered.device)
        torch.index_select(received, 0, self._rank_at, out=gathered)

    @staticmethod
    def _started(work: dist.Work | None) -> Ticket:
        # On the current stream there is nothing to wait for.
        return Done() if work is None else work
