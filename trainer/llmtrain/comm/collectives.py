"""The interface of the collectives of one process group; NCCL, gloo and shared memory implement it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain.comm.waits import Ticket
from llmtrain.comm.workspace import Workspace

# Their names since torch 2.13, which warns of the old ones.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Then:
    """Work with a last computation, which makes the result. work: None if it is done."""

    work: Ticket | None
    finish: Callable[[], object]

    def wait(self) -> None:
        """Wait for the work and compute the result."""
        if self.work is not None:
            self.work.wait()
        self.finish()


@dataclass(frozen=True)
class SharedParts:
    """Memory that all ranks of a group read: `parts[k]`, uint8 `[bytes]`, is written by rank k alone."""

    parts: Sequence[Tensor]
    sync: Callable[[], object]
    """Waits until every rank has called it: what the ranks wrote before can be read after."""


class Collectives(ABC):
    """The collectives of one process group, from the view of one of its ranks.

    All ranks of a group call the same methods in the same order. Every method starts a collective, which reads and
    writes its contiguous tensors until `wait` of the returned work has returned.
    """

    def __init__(
        self, group: dist.ProcessGroup, order: Sequence[int] | None = None, workspace: Workspace | None = None
    ) -> None:
        """order: for each rank of the group the position of its part in gathered tensors; None for the order of ranks.
        workspace: buffers for one collective at a time. None: several may be under way, each with buffers of its own.
        """
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.order = tuple(range(self.size) if order is None else order)
        self.workspace = workspace

    @property
    def position(self) -> int:
        """Position of this rank's part in gathered tensors."""
        return self.order[self.rank]

    @property
    def in_order(self) -> bool:
        """Whether the positions are in the order of ranks."""
        return self.order == tuple(range(self.size))

    @abstractmethod
    def all_gather(self, gathered: Tensor) -> Ticket:
        """Fill `gathered`, `[size * n]` of any dtype, with the parts of all ranks. This rank's part is at its position
        already."""

    @abstractmethod
    def reduce_scatter(self, values: Tensor, total: Tensor, wire: torch.dtype) -> Ticket:
        """Sum part k of all ranks' `values`, `[size * n]`, into rank k's `total`, `[n]`.

        The parts are sent as `wire` and added in fp32. total: fp32, or of the dtype `wire`.
        """

    @abstractmethod
    def all_to_all(self, received: Tensor, sent: Tensor) -> Ticket:
        """Send row k of `sent` to rank k, and put what it sends into row k of `received`. Both `[size, n]`, uint8."""

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Ticket:
        """Sum contiguous `x`, of any shape and float dtype, over the ranks in place. The result has the same bits on
        every rank."""

    def all_reduce_bytes(self, nbytes: int) -> int:
        """Return how many bytes this rank sends to others in an all-reduce of `nbytes`. This is that of a ring."""
        return 2 * nbytes * (self.size - 1) // self.size

    def share(self, nbytes: int) -> SharedParts | None:
        """Allocate `nbytes` for each rank that all of them read; None where ranks share no memory. Collective."""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's buffers."""
        return 0 if self.workspace is None else self.workspace.nbytes

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group(self.group)

    def _parts(self, gathered: Tensor) -> list[Tensor]:
        """Return views of the ranks' parts, by rank."""
        parts = gathered.chunk(self.size)
        return [parts[position] for position in self.order]

    def _buffer(self, name: str, like: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        if self.workspace is None:
            return like.new_empty(numel, dtype=dtype)
        return self.workspace.take(name, numel, dtype)

    def _as_wire(self, values: Tensor, wire: torch.dtype) -> Tensor:
        """Return `values` in the dtype in which they are sent."""
        return values if values.dtype == wire else self._buffer("sent", values, values.numel(), wire).copy_(values)


def add_in_order(parts: Sequence[Tensor], total: Tensor) -> None:
    """Write the sum of two or more `parts`, each `[n]` of any float dtype, to `total`, `[n]`. They are added in fp32,
    in order."""
    first, second, *others = parts
    if others and total.itemsize < torch.float32.itemsize:
        wide = torch.empty_like(total, dtype=torch.float32)
        add_in_order(parts, wide)
        total.copy_(wide)
        return
    # Row by row: on a CPU torch.sum over a few long rows takes twice the time.
    if first.dtype == second.dtype == total.dtype:
        torch.add(first, second, out=total)
    else:
        total.copy_(first).add_(second)
    for other in others:
        total.add_(other)
