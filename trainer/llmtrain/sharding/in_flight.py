"""Gathers and reductions in flight: each of their steps waits for the step before it, and for nothing else."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from llmtrain.comm.stream import Job
from llmtrain.comm.waits import Ticket
from llmtrain.comm.workspace import Workspace
from llmtrain.sharding.collectives import HopStep


@dataclass
class _Slot:
    workspace: Workspace
    ticket: Ticket | None = None


class InFlight:
    """Starts gathers or reductions on the streams of their steps. At most `count` are in flight at the same time, each
    with buffers of its own.

    The host would wait for a job in a thread before it queues the next step on a stream of the device. It queues that
    step later: when it starts the next gather or reduction, or waits for this one. All ranks do so at the same places.
    """

    def __init__(self, device: torch.device, count: int, sizes: Mapping[str, int]) -> None:
        """sizes: bytes of each buffer of one workspace, by name."""
        # Each has room for the largest unit, as a unit gets another workspace in every training step.
        self._slots = deque(_Slot(Workspace(device, sizes)) for _ in range(count))
        self._later: _Later | None = None

    def start(self, build: Callable[[Workspace], list[HopStep]]) -> list[Ticket]:
        """Start the steps that `build` makes with the workspace that it is given; return one ticket for each, or for
        all of those that are queued later."""
        if self._later is not None:
            self._later.queue()
        slot = self._slots[0]
        self._slots.rotate(-1)
        steps = build(slot.workspace)
        blocks = [step.stream.blocks for step in steps]
        now = next((index for index, pair in enumerate(pairwise(blocks), 1) if pair == (True, False)), len(steps))
        tickets = _queued(slot, steps[:now])
        if now < len(steps):
            self._later = _Later(partial(_queued, slot, steps[now:]))
            tickets.append(self._later)
        return tickets

    @property
    def nbytes(self) -> int:
        """Bytes of the workspaces."""
        return sum(slot.workspace.nbytes for slot in self._slots)


class _Later:
    """The ticket of steps that are not queued yet."""

    def __init__(self, submit: Callable[[], list[Ticket]]) -> None:
        self._submit: Callable[[], list[Ticket]] | None = submit
        self._tickets = list[Ticket]()

    def queue(self) -> None:
        """Queue the steps, once."""
        if self._submit is not None:
            self._tickets, self._submit = self._submit(), None

    def wait(self) -> None:
        """See Ticket."""
        self.queue()
        self._tickets[-1].wait()


def _queued(slot: _Slot, steps: Sequence[HopStep]) -> list[Ticket]:
    """Queue steps that work with a slot, each after the one before; return their tickets."""
    tickets = list[Ticket]()
    for step in steps:
        slot.ticket = step.stream.submit(_after(slot.ticket, step.job))
        tickets.append(slot.ticket)
    return tickets


def _after(ticket: Ticket | None, job: Job) -> Job:
    if ticket is None:
        return job

    def waiting() -> None:
        ticket.wait()
        job()

    return waiting
