"""Collectives between the CPUs of one machine through memory that the ranks share. gloo copies through sockets."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain.comm.collectives import Collectives, SharedParts, add_in_order
from llmtrain.comm.mapped_memory import shared_memory
from llmtrain.comm.waits import Done, Ticket
from llmtrain.comm.workspace import Workspace

SlotTensors = Sequence[Tensor]


@dataclass
class _Round:
    """One round of a collective: this rank has filled its slot. read: takes what the others put into theirs."""

    owner: "SharedMemoryCollectives"
    filled: Ticket
    read: Callable[[], object]
    done: bool = False

    def wait(self) -> None:
        """Wait for this round and all before it."""
        self.owner.finish(self)


class SharedMemoryCollectives(Collectives):
    """Every rank has some shared-memory slots; it writes to one of its own, and the others read.

    The ranks tell each other through gloo that slots are filled; gloo also finds out that a rank is gone. Sums are in
    the order of ranks.

    Slots are reused in turn. A rank that starts a round has read all rounds but the last few, as many as half of its
    slots. So when round r starts, with n slots, all ranks have started round r - n/2 and have read round r - n, whose
    slot may be overwritten.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        slots: SlotTensors,
        order: Sequence[int] | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        """slots: by rank, uint8 `[an even number, bytes]`. Half of the number may be under way at the same time."""
        super().__init__(group, order, workspace)
        self._slots, self._slot_bytes, self._next = slots, slots[0].shape[1], 0
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._open: deque[_Round] = deque()
        self._sent = torch.zeros(self.size, dtype=torch.uint8)
        self._received = torch.zeros_like(self._sent)

    @property
    def nbytes(self) -> int:
        """See Collectives. Here with this rank's slots."""
        return super().nbytes + self._slots[self.rank].nbytes

    def all_gather(self, gathered: Tensor) -> Ticket:
        """See Collectives."""
        work: Ticket = Done()
        parts = [part.view(torch.uint8) for part in self._parts(gathered)]
        for start in range(0, len(parts[0]), self._slot_bytes):
            work = self._gather([part[start : start + self._slot_bytes] for part in parts])
        return work

    def reduce_scatter(self, values: Tensor, total: Tensor, wire: torch.dtype) -> Ticket:
        """See Collectives."""
        work: Ticket = Done()
        rows = values.view(self.size, -1)
        columns = self._slot_bytes // self.size // wire.itemsize
        for start in range(0, len(total), columns):
            end = start + columns
            work = self._reduce(rows[:, start:end], total[start:end], wire)
        return work

    def all_to_all(self, received: Tensor, sent: Tensor) -> Ticket:
        """See Collectives."""
        received[self.rank].copy_(sent[self.rank])
        work: Ticket = Done()
        columns = self._slot_bytes // self.size
        for start in range(0, sent.shape[1], columns):
            end = start + columns
            work = self._exchange(received[:, start:end], sent[:, start:end])
        return work

    def all_reduce(self, x: Tensor) -> Ticket:
        """See Collectives. Every rank reads the full tensors of all others."""
        work: Ticket = Done()
        flat = x.view(-1)
        for start in range(0, len(flat), self._slot_bytes // x.itemsize):
            work = self._sum(flat[start : start + self._slot_bytes // x.itemsize])
        return work

    def all_reduce_bytes(self, nbytes: int) -> int:
        """See Collectives."""
        return nbytes * (self.size - 1)

    def share(self, nbytes: int) -> SharedParts | None:
        """See Collectives."""
        memory = shared_memory(self.group, nbytes)
        return SharedParts(memory, lambda: self._filled().wait()) if memory else None

    def finish(self, last: _Round) -> None:
        """Finish all rounds up to `last`, in order."""
        while not last.done:
            oldest = self._open.popleft()
            oldest.filled.wait()
            oldest.read()
            oldest.done = True

    def _gather(self, parts: Sequence[Tensor]) -> _Round:
        def read(slots: SlotTensors) -> None:
            for rank in self._others:
                parts[rank].copy_(slots[rank])

        return self._start(parts[0].nbytes, lambda slot: slot.copy_(parts[self.rank]), read)

    def _exchange(self, received: Tensor, sent: Tensor) -> _Round:
        def write(slot: Tensor) -> None:
            rows = slot.view(sent.shape)
            for rank in self._others:
                rows[rank].copy_(sent[rank])

        def read(slots: SlotTensors) -> None:
            for rank in self._others:
                received[rank].copy_(slots[rank].view(sent.shape)[self.rank])

        return self._start(sent.numel(), write, read)

    def _reduce(self, rows: Tensor, total: Tensor, wire: torch.dtype) -> _Round:
        # This rank's own row is added from where it is, unless it has to be rounded as all others are.
        exact = rows.dtype == wire

        def write(slot: Tensor) -> None:
            sent = slot.view(wire).view(rows.shape)
            for rank in self._others if exact else range(self.size):
                sent[rank].copy_(rows[rank])

        def read(slots: SlotTensors) -> None:
            found = [slot.view(wire).view(rows.shape)[self.rank] for slot in slots]
            if exact:
                found[self.rank] = rows[self.rank]
            add_in_order(found, total)

        return self._start(rows.numel() * wire.itemsize, write, read)

    def _sum(self, x: Tensor) -> _Round:
        # Its own part is added from the slot, as `x` takes the sum.
        return self._start(
            x.nbytes,
            lambda slot: slot.view(x.dtype).copy_(x),
            lambda slots: add_in_order([slot.view(x.dtype) for slot in slots], x),
        )

    def _start(self, nbytes: int, write: Callable[[Tensor], object], read: Callable[[SlotTensors], object]) -> _Round:
        """Start a round. write: called with the first `nbytes` of this rank's slot, which it fills. read: called with
        those of all ranks' slots, by rank."""
        count = len(self._slots[self.rank])
        if len(self._open) == count // 2:
            self._open[0].wait()
        slots = [own[self._next, :nbytes] for own in self._slots]
        self._next = (self._next + 1) % count
        write(slots[self.rank])
        started = _Round(self, self._filled(), partial(read, slots))
        self._open.append(started)
        return started

    def _filled(self) -> Ticket:
        """Tell all other ranks that this one has written, and hear it from them."""
        work = dist.all_to_all_single(self._received, self._sent, group=self.group, async_op=True)
        assert work is not None
        return work


def share_slots(group: dist.ProcessGroup, count: int, nbytes: int) -> list[Tensor]:
    """Return each rank's slots, uint8 `[count, nbytes]`, in the order of `group`; empty where the ranks cannot share
    memory. Collective."""
    return [part.view(count, nbytes) for part in shared_memory(group, count * nbytes)]
