"""Messages between processes of one machine through memory that they share, where gloo copies them through sockets."""

import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SLOT_BYTES = 8 << 20
"""Bytes that one member of a group tells the others at once."""

_TOKEN = 16


class SharedSlots:
    """Two slots for each member of a group: what it writes into one of its own, the others read.

    Members hear from each other that slots are filled, through gloo, which also finds out who is gone. Slots are used
    in turn: who has filled its next one has read all the ones before.
    """

    def __init__(self, group: dist.ProcessGroup, slots: Sequence[Tensor]) -> None:
        """slots: by member, uint8 `[2, ROOM]`."""
        self._group, self._slots, self._me = group, slots, group.rank()
        self._others = [member for member in range(len(slots)) if member != self._me]
        self._turn = self._used = 0
        self._told = torch.zeros(len(slots), dtype=torch.uint8)
        self._heard = torch.zeros_like(self._told)

    @property
    def nbytes(self) -> int:
        """Bytes of this member's slots; what was never written takes no memory."""
        return 2 * self._used

    def gather(self, parts: Sequence[Tensor], own: Tensor) -> None:
        """Fill `parts`, by member, with what each passes as `own`; this member's is not touched. One-dimensional."""
        mine, theirs = own.view(torch.uint8), [part.view(torch.uint8) for part in parts]
        for start in range(0, len(mine), SLOT_BYTES):
            piece = mine[start : start + SLOT_BYTES]
            self._slots[self._me][self._turn, : len(piece)].copy_(piece)
            self.tell(len(piece))
            for member in self._others:
                theirs[member][start : start + SLOT_BYTES].copy_(self._slots[member][self._turn, : len(piece)])
            self._turn = 1 - self._turn

    def exchange(self, received: Tensor, sent: Tensor) -> None:
        """Give row k of `sent` to member k, and put what it gives into row k of `received`. Both `[members, *]`."""
        outgoing, incoming = sent.view(torch.uint8), received.view(torch.uint8)
        incoming[self._me].copy_(outgoing[self._me])
        for start, found in self._rounds(outgoing, torch.uint8):
            for member in self._others:
                incoming[member, start : start + len(found[member])].copy_(found[member])

    def reduce(self, total: Tensor, values: Tensor, wire: torch.dtype) -> None:
        """Sum row k of every member's `values`, `[members, n]`, into member k's `total`, `[n]`, in the members' order.

        values travel as `wire`, and that is what is added.
        """
        for start, (first, second, *others) in self._rounds(values, wire):
            piece = total[start : start + len(first)]
            if wire == total.dtype:
                torch.add(first, second, out=piece)
            else:
                piece.copy_(first).add_(second)
            for other in others:
                piece.add_(other)

    def _rounds(self, sent: Tensor, wire: torch.dtype) -> Iterator[tuple[int, list[Tensor]]]:
        """Send row k of `sent` to member k as `wire`, as many columns at a time as there is room for.

        Yields the first column, and by member what it sent of them to this one.
        """
        share = SLOT_BYTES // len(self._slots) // wire.itemsize
        for start in range(0, sent.shape[1], share):
            rows = sent[:, start : start + share]
            size = rows.shape[1]
            own = self._parts(self._me, wire, size)
            for member in self._others if sent.dtype == wire else range(len(self._slots)):
                own[member].copy_(rows[member])
            self.tell(own.nbytes)
            found = [self._parts(member, wire, size)[self._me] for member in range(len(self._slots))]
            if sent.dtype == wire:
                found[self._me] = rows[self._me]
            yield start, found
            self._turn = 1 - self._turn

    def _parts(self, sender: int, wire: torch.dtype, size: int) -> Tensor:
        """Return the sender's slot as `[members, size]`, a row for each receiver, as far in front as can be."""
        members = len(self._slots)
        slot = self._slots[sender][self._turn, : members * size * wire.itemsize]
        return slot.view(wire).view(members, size)

    def tell(self, used: int = 0) -> None:
        """Say that this member has written, be it `used` bytes of its slot or elsewhere, and hear it of all others."""
        self._used = max(self._used, used)
        dist.all_to_all_single(self._heard, self._told, group=self._group)


def share_slots(group: dist.ProcessGroup) -> SharedSlots | None:
    """Make slots for the members of `group`; None where they cannot share memory. Collective."""
    memory = shared_memory(group, 2 * SLOT_BYTES)
    return SharedSlots(group, [part.view(2, SLOT_BYTES) for part in memory]) if memory else None


def shared_memory(group: dist.ProcessGroup, nbytes: int) -> list[Tensor]:
    """Make memory, uint8 `[nbytes]`, for each member of `group`, which all see; returns it by member. Collective.

    Nothing unless all are on one machine and can share memory. NCCL_SHM_DISABLE=1 forbids it, as it does NCCL. Machines
    with names of their own are told apart, also where they are played by one.
    """
    if group.size() == 1:
        return []
    descriptor = _memory(nbytes)
    own = _mapped(os.getpid(), descriptor, nbytes)
    token = os.urandom(_TOKEN)
    if own is not None:
        own[:_TOKEN] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
    where = (socket.gethostname(), os.getpid(), descriptor, token)
    told = _all_told(group, where)
    memory = [own if one == where else _opened(nbytes, where[0], *one) for one in told]
    found = [part for part in memory if part is not None]
    everywhere = all(_all_told(group, len(found) == len(memory)))
    if descriptor is not None:
        os.close(descriptor)
    return found if everywhere else []


def _memory(nbytes: int) -> int | None:
    """Return a file of memory, which takes as much as is written; None where there is none to be had."""
    if os.environ.get("NCCL_SHM_DISABLE") == "1" or not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = os.memfd_create("llmtrain")
    except OSError:
        return None
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _opened(nbytes: int, here: str, host: str, process: int, descriptor: int | None, token: bytes) -> Tensor | None:
    """Return another member's memory, of which it told the last four; None where this process cannot see it."""
    memory = _mapped(process, descriptor, nbytes) if host == here else None
    # In a container of its own, another process may have that number.
    return memory if memory is not None and bytes(memory[:_TOKEN].tolist()) == token else None


def _mapped(process: int, descriptor: int | None, nbytes: int) -> Tensor | None:
    """Return a process's file of memory as uint8 `[nbytes]`; None where that cannot be had. Keeps no file open."""
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        if descriptor is None or os.stat(path).st_size != nbytes:
            return None
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    except (OSError, RuntimeError):
        return None


def _all_told(group: dist.ProcessGroup, own: object) -> list[Any]:
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, own, group=group)
    return told
