"""Gathers and reductions in flight: each of their steps waits for the step before it, and for nothing else."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
    with buffers of its own."""

    def __init__(self, device: torch.device, count: int, sizes: Mapping[str, int]) -> None:
        """sizes: bytes of each buffer of one workspace, by name."""
        # Each has room for the largest unit, as a unit gets another workspace in every training step.
        self._slots = deque(_Slot(Workspace(device, sizes)) for _ in range(count))

    def start(self, build: Callable[[Workspace], list[HopStep]]) -> list[Ticket]:
        """Start the steps that `build` makes with the workspace that it is given; return one ticket for each."""
        slot = self._slots[0]
        self._slots.rotate(-1)
        tickets: list[Ticket] = []
        before = slot.ticket
        for step in build(slot.workspace):
            before = step.stream.submit(_after(before, step.job))
            tickets.append(before)
        slot.ticket = before
        return tickets

    @property
    def nbytes(self) -> int:
        """Bytes of the workspaces."""
        return sum(slot.workspace.nbytes for slot in self._slots)


def _after(ticket: Ticket | None, job: Job) -> Job:
    if ticket is None:
        return job

    def waiting() -> None:
        ticket.wait()
        job()

    return waiting
