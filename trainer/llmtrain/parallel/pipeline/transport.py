"""Carries activations and their gradients between pipeline stages: posts receives early and keeps tensors that are
being sent."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmtrain.comm.messages import Channel, Messages, Request


@dataclass
class _Inbox:
    """One channel's messages: the shapes of those without a posted receive yet, and the posted receives.

    asked: whether somebody asks for arrivals, so that the backend has to look for the next one, if it may.
    """

    shapes: deque[torch.Size] = field(default_factory=deque)
    posted: deque[tuple[Tensor, Request]] = field(default_factory=deque)
    asked: bool = False


@dataclass
class _Outbox:
    """One channel's sends whose tensors are kept. released: sends that are over. answered: sends whose answers have
    come."""

    sent: deque[tuple[Tensor, Request]] = field(default_factory=deque)
    released: int = 0
    answered: int = 0

    def release_completed(self) -> None:
        while self.sent and self.sent[0][1].is_completed():
            self._release()

    def answer(self) -> None:
        """Release the oldest send that has no answer yet: its message has arrived."""
        self.answered += 1
        while self.released < self.answered:
            self._release()

    def flush(self) -> None:
        while self.sent:
            self._release()
        self.released = self.answered = 0

    def _release(self) -> None:
        _, request = self.sent.popleft()
        request.wait()
        self.released += 1


class Transport:
    """Tensors on channels between this rank and the ranks of other stages. Without channels it does nothing.

    messages: the backend. dtype, device: of all tensors. posted_bytes: most bytes of receives that were posted and not
    taken immediately.
    """

    def __init__(self, messages: Messages, dtype: torch.dtype, device: torch.device) -> None:
        self._messages, self._dtype, self._device = messages, dtype, device
        self._inboxes: dict[Channel, _Inbox] = {}
        self._outboxes: dict[Channel, _Outbox] = {}
        self.posted_bytes = self._posted = 0

    def expect(self, channel: Channel, shapes: Iterable[torch.Size]) -> None:
        """Announce the next messages of a channel, so that their receives can be posted early."""
        inbox = self._inboxes.setdefault(channel, _Inbox())
        inbox.shapes.extend(shapes)
        self._post(channel, inbox, self._messages.posting.at_start)
        self.posted_bytes = max(self.posted_bytes, self._posted)

    def receive(self, channel: Channel) -> Tensor:
        """Wait for the next message of a channel and return it, with the shape and dtype that were announced."""
        inbox = self._inboxes[channel]
        self._post(channel, inbox, 1)
        values, request = inbox.posted.popleft()
        self._posted -= values.nbytes
        # Post before waiting: nothing should delay the computation once the message is there.
        self._post(channel, inbox, self._messages.posting.ahead)
        self.posted_bytes = max(self.posted_bytes, self._posted)
        request.wait()
        inbox.asked = inbox.asked and bool(inbox.posted)
        if inbox.asked:
            # Look for the next message during the computation. Otherwise `arrived` would say no after it.
            inbox.posted[0][1].is_completed()
        if channel.source > channel.target and (answered := self._outboxes.get(_reverse(channel))):
            # A gradient answers an activation, whose memory is free now. gloo does not report this by itself.
            answered.answer()
        return values

    def arrived(self, channel: Channel) -> bool:
        """Return whether the next message of a channel has arrived."""
        return any(request.is_completed() for request in self._next([channel]))

    def wait_any(self, channels: Sequence[Channel]) -> None:
        """Wait until the next message of any of `channels` has arrived."""
        requests = self._next(channels)
        self._messages.until(lambda: any(request.is_completed() for request in requests))

    def send(self, channel: Channel, values: Tensor) -> None:
        """Start sending a tensor, of any shape and dtype. It must not change before `flush` returns."""
        values, outbox = values.contiguous(), self._outboxes.setdefault(channel, _Outbox())
        request = self._messages.send(channel, values)
        self.progress()
        outbox.sent.append((values, request))

    def progress(self) -> None:
        """Release tensors that have been sent. MPI, which has no thread of its own, works on large messages only while
        it is asked for them."""
        for outbox in self._outboxes.values():
            outbox.release_completed()

    def flush(self) -> None:
        """Wait until all tensors have been sent."""
        for outbox in self._outboxes.values():
            outbox.flush()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that sends go through."""
        return self._messages.nbytes

    def close(self) -> None:
        """Stop the backend."""
        self._messages.close()

    def _next(self, channels: Sequence[Channel]) -> list[Request]:
        """Return the receives of the next messages of those of `channels` that expect any."""
        found = []
        for channel in channels:
            inbox = self._inboxes.setdefault(channel, _Inbox())
            self._post(channel, inbox, 1)
            if inbox.posted:
                inbox.asked = self._messages.posting.watched
                found.append(inbox.posted[0][1])
        self.posted_bytes = max(self.posted_bytes, self._posted)
        return found

    def _post(self, channel: Channel, inbox: _Inbox, count: int) -> None:
        """Post receives until `count` are posted, or no message is left to expect."""
        while inbox.shapes and len(inbox.posted) < count:
            values = torch.empty(inbox.shapes.popleft(), dtype=self._dtype, device=self._device)
            inbox.posted.append((values, self._messages.receive(channel, values)))
            self._posted += values.nbytes


def _reverse(channel: Channel) -> Channel:
    return Channel(channel.target, channel.source)
