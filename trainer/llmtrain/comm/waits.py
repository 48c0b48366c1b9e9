"""What a thread, or a stream of the device, waits for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Ticket(Protocol):
    """Stands for work that is queued or has started: a job, a collective, copies."""

    def wait(self) -> object:
        """Let nothing that this thread computes next start before the work is done. On CUDA the current stream waits,
        and the host continues. Raises what the work raised."""


class Event(Ticket, Protocol):
    """A point in a stream of the device. CUDA's events are such."""

    def synchronize(self) -> None:
        """Let the host wait for it."""

    def query(self) -> bool:
        """Whether the device has passed it."""


class Done:
    """The ticket and the event of what is done already."""

    def wait(self) -> None:
        """See Ticket."""

    def synchronize(self) -> None:
        """See Event."""

    def query(self) -> bool:
        """See Event."""
        return True


@dataclass(frozen=True)
class AllOf:
    """Several pieces of work as one, or one in a thread that has queued work on a CUDA stream."""

    tickets: Sequence[Ticket]

    def wait(self) -> None:
        """See Ticket."""
        for ticket in self.tickets:
            ticket.wait()
