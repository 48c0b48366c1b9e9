"""Point-to-point messages between pipeline stages: the interface that shared memory, gloo, NCCL and
MPI implement."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from llmtrain.plan.program.posted_receives import Posting


@dataclass(frozen=True)
class Channel:
    """Messages from one pipeline stage to another. They arrive in the order in which they were sent."""

    source: int
    target: int


class Request(Protocol):
    """A posted send or receive. Its tensor must live until it is complete."""

    def is_completed(self) -> bool:
        """Return whether the message has been sent or has arrived. Some backends never report this of a send."""

    def wait(self) -> object:
        """Have what is computed next come after the message. Call it once. Raises RuntimeError for a lost peer."""


class Messages(Protocol):
    """Posts sends and receives on channels."""

    posting: Posting
    """How many receives to post on each channel."""

    def receive(self, channel: Channel, values: Tensor) -> Request:
        """Post a receive of a channel's next message into contiguous `values`, of the message's shape and dtype."""

    def send(self, channel: Channel, values: Tensor) -> Request:
        """Post a send of contiguous `values`, of any shape and dtype, which must not change before the request
        completes."""

    def until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds. It may depend on `is_completed` of receives, and nothing else."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that this rank's sends go through."""

    def close(self) -> None:
        """Stop background threads and leave the communicators."""
