"""What carries activations and their gradients from stage to stage."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Channel:
    """Messages from one stage to the next or back, in the order in which both sides name them."""

    source: int
    target: int


class Transport(Protocol):
    """Carries tensors on channels between the ranks of a pipeline."""

    def expect(self, channel: Channel, shapes: Iterable[torch.Size]) -> None:
        """Say which messages come next on a channel; receives are posted ahead of need."""

    def receive(self, channel: Channel) -> Tensor:
        """Return the next message of a channel, waiting for it."""

    def arrived(self, channel: Channel) -> bool:
        """Return whether the next message of a channel is there."""

    def wait_any(self, channels: Sequence[Channel]) -> None:
        """Wait until the next message of any of `channels` is there."""

    def send(self, channel: Channel, values: Tensor) -> None:
        """Start to send a tensor, which must not change until `flush`."""

    def progress(self) -> None:
        """Help on what was sent; called between computations that others do not wait for."""

    def flush(self) -> None:
        """Wait until all that was sent is on its way and its tensors are free."""

    def close(self) -> None:
        """End what runs in the background, and leave the other ranks."""


class _Watcher:
    """A thread that waits for works one after another: gloo tells that a message is there only to those who wait for
    it. It holds up nobody's end, as what it waits for may never come."""

    def __init__(self) -> None:
        self._works: SimpleQueue[tuple[dist.Work, Future[None]] | None] = SimpleQueue()
        Thread(target=self._run, name="pipeline", daemon=True).start()

    def watch(self, work: dist.Work) -> "Future[None]":
        """Return what tells that a work is done."""
        done: Future[None] = Future()
        self._works.put((work, done))
        return done

    def close(self) -> None:
        """End the thread once it has waited for all works."""
        self._works.put(None)

    def _run(self) -> None:
        while (item := self._works.get()) is not None:
            work, done = item
            try:
                work.wait()
            except RuntimeError as error:
                done.set_exception(error)
            else:
                done.set_result(None)


@dataclass
class _Inbox:
    """One channel's messages: still to be posted, and posted. watched: whether the next is there, once asked for."""

    shapes: deque[torch.Size] = field(default_factory=deque)
    posted: deque[tuple[Tensor, dist.Work]] = field(default_factory=deque)
    watcher: _Watcher | None = None
    watched: "Future[None] | None" = None

    def watch(self) -> "Future[None]":
        """Return what tells that the next message is there."""
        self.watcher = self.watcher or _Watcher()
        self.watched = self.watched or self.watcher.watch(self.posted[0][1])
        return self.watched


class TorchTransport:
    """torch.distributed's messages; every channel has a process group of two, so that none waits for another.

    peers: by channel, its group and the other side's rank. ahead: receives that are posted ahead of need on each
    channel, at least as many as messages under way: gloo sends one only when it was told of its receive, which on a
    link of long latency comes late else.
    """

    def __init__(
        self,
        peers: Mapping[Channel, tuple[dist.ProcessGroup, int]],
        device: torch.device,
        dtype: torch.dtype,
        ahead: int,
    ) -> None:
        self._peers, self._device, self._dtype, self._ahead = peers, device, dtype, ahead
        self._inboxes: dict[Channel, _Inbox] = {}
        self._sent: dict[Channel, deque[tuple[Tensor, dist.Work]]] = {channel: deque() for channel in peers}
        if device.type == "cuda":
            self._connect()

    def expect(self, channel: Channel, shapes: Iterable[torch.Size]) -> None:
        """Say which messages come next on a channel."""
        inbox = self._inboxes.setdefault(channel, _Inbox())
        inbox.shapes.extend(shapes)
        self._post(channel, inbox)

    def receive(self, channel: Channel) -> Tensor:
        """Return the next message of a channel, waiting for it."""
        inbox = self._inboxes[channel]
        values, work = inbox.posted.popleft()
        # Now, as this one may have to be waited for, and nothing should be between it and what is computed with it.
        self._post(channel, inbox)
        if inbox.watched is not None:
            inbox.watched.result()
            inbox.watched = None
            if inbox.posted:
                # Now, or whoever asks for it after the next computation is told that it is not there, though it is.
                inbox.watch()
        else:
            work.wait()
        there = self._sent.get(Channel(channel.target, channel.source))
        if there and channel.source > channel.target:
            # A gradient comes back after the activation has arrived, whose memory is free now.
            there.popleft()[1].wait()
        return values

    def arrived(self, channel: Channel) -> bool:
        """Return whether the next message of a channel is there."""
        inbox = self._inboxes.get(channel)
        if inbox is None or not inbox.posted:
            return False
        return inbox.posted[0][1].is_completed() if self._device.type == "cuda" else inbox.watch().done()

    def wait_any(self, channels: Sequence[Channel]) -> None:
        """Wait until the next message of any of `channels` is there."""
        if self._device.type == "cuda":
            while not any(self.arrived(channel) for channel in channels):
                pass
            return
        inboxes = [self._inboxes[channel] for channel in channels if channel in self._inboxes]
        wait([inbox.watch() for inbox in inboxes if inbox.posted], return_when=FIRST_COMPLETED)

    def send(self, channel: Channel, values: Tensor) -> None:
        """Start to send a tensor."""
        group, peer = self._peers[channel]
        values = values.contiguous()
        work = dist.isend(values, peer, group=group)
        assert work is not None
        sent = self._sent[channel]
        # Nothing comes back for a gradient; an activation goes when its own gradient has come.
        while channel.source > channel.target and sent and sent[0][1].is_completed():
            sent.popleft()
        sent.append((values, work))

    def progress(self) -> None:
        """Do nothing: gloo and NCCL help themselves."""

    def flush(self) -> None:
        """Wait until all that was sent is on its way."""
        for sent in self._sent.values():
            while sent:
                sent.popleft()[1].wait()

    def close(self) -> None:
        """End the threads and leave the process groups."""
        for inbox in self._inboxes.values():
            if inbox.watcher is not None:
                inbox.watcher.close()
        for group, _ in self._peers.values():
            dist.destroy_process_group(group)

    def _connect(self) -> None:
        """Have NCCL connect the two sides of each channel, in an order that all ranks share: it does so at the first
        message, and holds up the host until the other side comes to one, which may be behind what waits for this."""
        one = torch.zeros(1, dtype=self._dtype, device=self._device)
        for group, peer in self._peers.values():
            (dist.send if dist.get_rank() < peer else dist.recv)(one, peer, group=group)

    def _post(self, channel: Channel, inbox: _Inbox) -> None:
        group, peer = self._peers[channel]
        while inbox.shapes and len(inbox.posted) < self._ahead:
            values = torch.empty(inbox.shapes.popleft(), dtype=self._dtype, device=self._device)
            work = dist.irecv(values, peer, group=group)
            assert work is not None
            inbox.posted.append((values, work))
