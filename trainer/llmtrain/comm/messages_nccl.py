"""Messages between pipeline stages over NCCL, on GPUs. Written after the documentation of NCCL and torch.distributed;
not yet run on a GPU."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain.comm.arrivals import Arrivals
from llmtrain.comm.messages import Channel, Posting, Request


class NcclMessages:
    """torch.distributed's sends and receives, which are kernels on a stream of their communicator.

    They cannot deadlock: each channel has a communicator, and so a stream, of its own, on which both ends post in the
    order of messages. A kernel whose other end is late delays its own channel alone, so it does not matter in which
    order a rank posts on different channels. Kernels of several communicators run at once as long as the GPU has room
    for all of them, so at most one receive and one send of each channel run at a time.

    peers: each channel's group, and the rank at its other end, in an order that all ranks share.
    """

    # A receive occupies multiprocessors until its message arrives. The first one is therefore posted when it is
    # needed; each later one is posted as the one before it is taken, and arrives while the stage computes.
    posting = Posting(at_start=0, ahead=1)

    def __init__(self, peers: Mapping[Channel, tuple[dist.ProcessGroup, int]], device: torch.device) -> None:
        self._peers, self._device, self._arrivals = peers, device, Arrivals()
        self._streams: dict[Channel, torch.cuda.Stream] = {}
        self._connect()

    def receive(self, channel: Channel, values: Tensor) -> Request:
        """Post a receive."""
        group, peer = self._peers[channel]
        work = dist.irecv(values, peer, group=group)
        assert work is not None
        return _Receive(work, lambda: self._watch(channel, work))

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
        """End the threads and leave the communicators."""
        self._arrivals.close()
        for group, _ in self._peers.values():
            dist.destroy_process_group(group)

    def _connect(self) -> None:
        """Connect the two ends of each channel, channel by channel in the order that all ranks share.

        NCCL connects at the first message and blocks the host until the other end has one too. During training the
        other end might be waiting for a different channel.
        """
        for group, peer in self._peers.values():
            one = torch.zeros(1, device=self._device)
            (dist.send if dist.get_rank() < peer else dist.recv)(one, peer, group=group)

    def _watch(self, channel: Channel, work: dist.Work) -> "Future[None]":
        """Have the channel's thread wait for a receive."""
        if channel not in self._streams:
            self._streams[channel] = torch.cuda.Stream(self._device)
        # The thread sleeps until the event, where a plain event would have it spin.
        event = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._streams[channel]):
            # The stream waits, not the host.
            work.wait()
            event.record()
        return self._arrivals.watch(channel, event.synchronize)


class _Receive:
    """A receive whose arrival a thread watches from the first `is_completed` on."""

    def __init__(self, work: dist.Work, watch: "Callable[[], Future[None]]") -> None:
        self._work, self._watch = work, watch
        self._arrival: Future[None] | None = None

    def is_completed(self) -> bool:
        self._arrival = self._arrival or self._watch()
        return self._arrival.done()

    def wait(self) -> None:
        """Have the current stream wait for the message; the host goes on."""
        self._work.wait()
