"""Messages between pipeline stages over torch.distributed: what gloo and NCCL share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch.distributed as dist
from torch import Tensor

from llmtrain.comm.arrivals import Arrivals, Wait
from llmtrain.comm.messages import Channel, Request
from llmtrain.plan.program.posted_receives import Posting


class TorchMessages(ABC):
    """Each channel has a process group of its own, so that no message waits for one of another channel.

    peers: each channel's group, and the rank at its other end. on_arrival: called by a thread after each arrival.
    """

    def __init__(
        self,
        peers: Mapping[Channel, tuple[dist.ProcessGroup, int]],
        posting: Posting,
        on_arrival: Callable[[], object] = lambda: None,
    ) -> None:
        self.peers, self.posting, self._arrivals = peers, posting, Arrivals(on_arrival)

    def receive(self, channel: Channel, values: Tensor) -> Request:
        """See Messages."""
        group, peer = self.peers[channel]
        work = dist.irecv(values, peer, group=group)
        assert work is not None
        return _Receive(work, lambda: self._arrivals.watch(channel, self.arrival(channel, work)))

    def send(self, channel: Channel, values: Tensor) -> Request:
        """See Messages."""
        group, peer = self.peers[channel]
        work = dist.isend(values, peer, group=group)
        assert work is not None
        return work

    def until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds."""
        self._arrivals.until(condition)

    @property
    def nbytes(self) -> int:
        """See Messages. The backend's own buffers do not count."""
        return 0

    def close(self) -> None:
        """End the threads and leave the process groups."""
        self._arrivals.close()
        for group, _ in self.peers.values():
            dist.destroy_process_group(group)

    @abstractmethod
    def arrival(self, channel: Channel, work: dist.Work) -> Wait:
        """Return what a thread calls to wait until a posted receive has its message."""


class _Receive:
    """A receive that a thread waits for from the first `is_completed` on; without one, `wait` does."""

    def __init__(self, work: dist.Work, watch: "Callable[[], Future[None]]") -> None:
        self._work, self._watch = work, watch
        self._arrival: Future[None] | None = None

    def is_completed(self) -> bool:
        self._arrival = self._arrival or self._watch()
        return self._arrival.done()

    def wait(self) -> None:
        if self._arrival is None:
            self._work.wait()
        else:
            # Not the work a second time: gloo would wait for another message.
            self._arrival.result()
