"""Gathers or reductions under way: each hop of one waits for its hop before, and for nothing else."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from llmtrain.sharding.collectives import Stage
from llmtrain.sharding.stream import Job, Ticket
from llmtrain.sharding.workspace import Scratch


@dataclass
class _Flight:
    scratch: Scratch
    ticket: Ticket | None = None


class Flights:
    """Starts lists of stages on their hops' lanes; at most `count` are under way at once, each with its own buffers."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._flights = deque(_Flight(Scratch(device)) for _ in range(count))

    def start(self, build: Callable[[Scratch], list[Stage]]) -> list[Ticket]:
        """Start the stages that `build` makes with the buffers it is given; returns one ticket for each, in order."""
        flight = self._flights[0]
        self._flights.rotate(-1)
        tickets: list[Ticket] = []
        before = flight.ticket
        stages = build(flight.scratch)
        for other in self._flights:
            # Which unit meets which flight changes from step to step: all grow in the first one.
            other.scratch.match(flight.scratch)
        for stage in stages:
            before = stage.hop.lane.submit(_after(before, stage.job))
            tickets.append(before)
        flight.ticket = before
        return tickets

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(flight.scratch.nbytes for flight in self._flights)


def _after(ticket: Ticket | None, job: Job) -> Job:
    if ticket is None:
        return job

    def waiting() -> None:
        ticket.wait()
        job()

    return waiting
