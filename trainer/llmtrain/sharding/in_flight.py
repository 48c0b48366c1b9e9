"""Gathers or reductions under way: each hop of one waits for its hop before, and for nothing else."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from llmtrain.comm.stream import Job, Ticket
from llmtrain.comm.workspace import Workspace
from llmtrain.sharding.collectives import HopStep


@dataclass
class _Slot:
    workspace: Workspace
    ticket: Ticket | None = None


class InFlight:
    """Starts lists of stages on their hops' streams; at most `count` are under way at once, each with its own
    buffers."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._slots = deque(_Slot(Workspace(device)) for _ in range(count))

    def start(self, build: Callable[[Workspace], list[HopStep]]) -> list[Ticket]:
        """Start the stages that `build` makes with the buffers it is given; returns one ticket for each, in order."""
        slot = self._slots[0]
        self._slots.rotate(-1)
        tickets: list[Ticket] = []
        before = slot.ticket
        steps = build(slot.workspace)
        for other in self._slots:
            # Which unit meets which flight changes from step to step: all grow in the first one.
            other.workspace.match(slot.workspace)
        for step in steps:
            before = step.hop.stream.submit(_after(before, step.job))
            tickets.append(before)
        slot.ticket = before
        return tickets

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(slot.workspace.nbytes for slot in self._slots)


def _after(ticket: Ticket | None, job: Job) -> Job:
    if ticket is None:
        return job

    def waiting() -> None:
        ticket.wait()
        job()

    return waiting
