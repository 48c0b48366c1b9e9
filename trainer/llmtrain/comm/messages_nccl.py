"""Messages between pipeline stages over NCCL, on GPUs. Written after the documentation of NCCL and torch.distributed;
not yet run on a GPU."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain.comm.arrivals import Wait
from llmtrain.comm.messages import Channel, Request
from llmtrain.comm.messages_torch import TorchMessages
from llmtrain.comm.posted_receives import PostedReceives
from llmtrain.plan.program.posted_receives import posting_of


class NcclMessages(TorchMessages):
    """Sends and receives are kernels on the stream of their communicator, and the host waits for none of them, unless
    it asks for arrivals.

    They cannot deadlock: each channel has a communicator, and so a stream, of its own, on which both ends post in the
    order of messages. A kernel whose other end is late delays its own channel alone, so it does not matter in which
    order a rank posts on different channels. Kernels of several communicators run at the same time as long as the GPU
    has room for all of them, so at most one receive and one send of each channel run at a time.

    CUDA waits for an idle GPU to free memory, and to load a kernel. So the host posts a receive no earlier than it asks
    for the message, which then depends on nothing that the host has yet to launch. The receive comes after what the GPU
    had to compute when its memory was allocated, as the message before was taken. So it runs during the computation
    that the host has launched since.

    A large send ends only with its receive. In the first step kernels are loaded, so a host may wait for its sends
    there, while the receiver waits for a message that this host has yet to launch. So a thread posts the first sends of
    each channel, each once its receive is posted.

    peers: see TorchMessages; in an order that all ranks share. posted: tells of receives; None to hold no send.
    """

    def __init__(
        self,
        peers: Mapping[Channel, tuple[dist.ProcessGroup, int]],
        device: torch.device,
        posted: PostedReceives | None = None,
    ) -> None:
        super().__init__(peers, posting_of("nccl", 1))
        self._device, self._posted = device, posted
        self._held_sends: dict[Channel, _HeldSend] = {}
        self._streams: dict[Channel, torch.cuda.Stream] = {}
        self._connect()

    def receive(self, channel: Channel, values: Tensor) -> Request:
        """See Messages."""
        free = torch.cuda.current_stream().record_event()

        def post() -> Request:
            stream = self._stream(channel)
            stream.wait_event(free)
            with torch.cuda.stream(stream):
                found = TorchMessages.receive(self, channel, values)
            if self._posted is not None:
                self._posted.tell(channel)
            return found

        return _LateReceive(post)

    def send(self, channel: Channel, values: Tensor) -> Request:
        """See Messages."""
        receive, before = None if self._posted is None else self._posted.next(channel), self._held_sends.get(channel)
        # Messages keep their order.
        if receive is None and (before is None or before.is_posted()):
            self._held_sends.pop(channel, None)
            return TorchMessages.send(self, channel, values)
        computed = torch.cuda.current_stream().record_event()
        held_send = self._held_sends[channel] = _HeldSend()

        def post() -> None:
            if before is not None:
                # After one that has failed, the receiver would take this message for that one.
                before.posted.result()
            if receive is not None:
                receive()
            stream = self._stream(channel)
            stream.wait_event(computed)
            with torch.cuda.stream(stream):
                held_send.work = TorchMessages.send(self, channel, values)

        held_send.posted = self._arrivals.watch(channel, post)
        return held_send

    def arrival(self, channel: Channel, work: dist.Work) -> Wait:
        """See TorchMessages."""
        # A thread that waits for a blocking event sleeps. For another kind of event it would spin.
        event = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream(channel)):
            # The stream waits, not the host.
            work.wait()
            event.record()
        return event.synchronize

    def _stream(self, channel: Channel) -> torch.cuda.Stream:
        """Return the stream on which a channel's receives, and its sends that are held, are posted."""
        if channel not in self._streams:
            self._streams[channel] = torch.cuda.Stream(self._device)
        return self._streams[channel]

    def _connect(self) -> None:
        """Connect the two ends of each channel, channel by channel in the order that all ranks share.

        NCCL connects at the first message and blocks the host until the other end has one too. During training the
        other end might be waiting for a different channel.
        """
        for group, peer in self.peers.values():
            one, first = torch.zeros(1, device=self._device), dist.get_rank() < peer
            # NCCL connects each direction by itself, and a channel has one of them.
            for exchange in (dist.send, dist.recv) if first else (dist.recv, dist.send):
                exchange(one, peer, group=group)


class _LateReceive:
    """A receive that is posted when somebody asks or waits for its message."""

    def __init__(self, post: Callable[[], Request]) -> None:
        self._post = post
        self._request: Request | None = None

    def is_completed(self) -> bool:
        return self._posted().is_completed()

    def wait(self) -> None:
        self._posted().wait()

    def _posted(self) -> Request:
        self._request = self._request or self._post()
        return self._request


class _HeldSend:
    """A send that a thread posts. posted: completes when it has, or has failed to. work: the send, once it is
    posted."""

    posted: "Future[None]"
    work: Request

    def is_posted(self) -> bool:
        return self.posted.done() and self.posted.exception() is None

    def is_completed(self) -> bool:
        # `wait` raises the error of one that has failed.
        return self.posted.done() and (not self.is_posted() or self.work.is_completed())

    def wait(self) -> None:
        self.posted.result()
        self.work.wait()
