"""Messages between pipeline stages over gloo, on CPUs."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch.distributed as dist
from torch import Tensor

from llmtrain.comm.arrivals import Arrivals
from llmtrain.comm.messages import Channel, Posting, Request


class GlooMessages:
    """torch.distributed's sends and receives. Each channel has a process group of its own, so that no message waits
    for one of another channel.

    peers: each channel's group, and the rank at its other end. ahead: receives to post ahead, at least as many as there
    are messages in flight: gloo sends a message only once it knows of its receive, which costs a round trip.
    """

    def __init__(self, peers: Mapping[Channel, tuple[dist.ProcessGroup, int]], ahead: int) -> None:
        self._peers, self._arrivals = peers, Arrivals()
        self.posting = Posting(at_start=ahead, ahead=ahead)

    def receive(self, channel: Channel, values: Tensor) -> Request:
        """Post a receive."""
        group, peer = self._peers[channel]
        work = dist.irecv(values, peer, group=group)
        assert work is not None
        return _Receive(work, lambda: self._arrivals.watch(channel, work.wait))

    def send(self, channel: Channel, values: Tensor) -> Request:
        """Post a send."""
        group, peer = self._peers[channel]
        work = dist.isend(values, peer, group=group)
        assert work is not None
        return work

    def until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds."""
        self._arrivals.until(condition)

    def close(self) -> None:
        """End the threads and leave the process groups."""
        self._arrivals.close()
        for group, _ in self._peers.values():
            dist.destroy_process_group(group)


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
            # gloo completes a work for one waiter only.
            self._arrival.result()
