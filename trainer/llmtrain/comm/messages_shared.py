"""Messages between pipeline stages on CPUs of one machine, through memory that the two ranks share."""

import os
import select
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Condition, Lock, Thread

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from llmtrain.comm.mapped_memory import shared_memory
from llmtrain.comm.messages import Channel, Messages, Request
from llmtrain.comm.pipes import Pipes, connect_pipes
from llmtrain.plan.per_rank.message_buffers import message_slots
from llmtrain.plan.program.posted_receives import posting_of

SlotBytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Ring:
    """What the two ends of a channel share. own, theirs: the slots that this rank and the other one write to, uint8
    `[slots, bytes]`. pipes: carry the numbers of filled slots to the receiver, and of free slots to the sender."""

    group: dist.ProcessGroup
    own: SlotBytes
    theirs: SlotBytes
    pipes: Pipes


def share_ring(group: dist.ProcessGroup, ahead: int, nbytes: int) -> Ring | None:
    """Allocate the slots of a channel between the two ranks of `group`; None where they share no memory. Collective.

    ahead: messages of `nbytes` that fit into the slots.
    """
    count, width = message_slots(ahead, nbytes)
    memory = shared_memory(group, count * width)
    pipes = connect_pipes(group) if memory else None
    if pipes is None:
        return None
    slots = [part.view(count, width).numpy() for part in memory]
    return Ring(group, slots[group.rank()], slots[1 - group.rank()], pipes)


class SharedMemoryMessages:
    """The sender copies a message into free slots of its own, and the receiver copies it out and frees them.

    A send is complete as soon as the message is in slots. If no slot is free, the rest of the message waits for one in
    a thread, so neither the computation nor a collective of the sender holds it up. A receive takes memory when it is
    needed: no receive has to be posted ahead. The pipes also tell that the other rank has ended.
    """

    posting = posting_of("shared", 0)

    def __init__(self, rings: Mapping[Channel, Ring]) -> None:
        """rings: of this rank's channels."""
        self._rings = rings
        self._incoming: dict[Channel, _Incoming] = {}
        self._outgoing: dict[Channel, _Outgoing] = {}
        self._polled: dict[int, Callable[[], bool]] = {}
        self._poll = select.poll()
        self._wake, self._waking = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), Lock()
        self._watch(self._wake, lambda: bool(os.eventfd_read(self._wake)))

    @property
    def nbytes(self) -> int:
        """See Messages."""
        return sum(self._rings[channel].own.nbytes for channel in self._outgoing)

    def receive(self, channel: Channel, values: Tensor) -> Request:
        """See Messages."""
        if channel not in self._incoming:
            self._incoming[channel] = _Incoming(self._rings[channel])
            self._watch(self._rings[channel].pipes.fileno(), self._incoming[channel].look)
        return _Receive(self._incoming[channel], _bytes(values), self.until)

    def send(self, channel: Channel, values: Tensor) -> Request:
        """See Messages."""
        if channel not in self._outgoing:
            self._outgoing[channel] = _Outgoing(self._rings[channel])
        return self._outgoing[channel].send(_bytes(values))

    def until(self, condition: Callable[[], bool]) -> None:
        """See Messages. The thread sleeps until a message comes, a sender ends, or `wake` is called."""
        while not condition():
            for descriptor, _ in self._poll.poll():
                if not self._polled[descriptor]():
                    # At its end a pipe would be ready forever.
                    self._poll.unregister(descriptor)

    def wake(self) -> None:
        """Have `until` test its condition again. Any thread may call it, after `close` too: a file that has taken the
        descriptor's number by then must not be written to."""
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the pipes and leave the process groups."""
        for channel, ring in self._rings.items():
            if channel not in self._outgoing or self._outgoing[channel].idle:
                ring.pipes.close()
            dist.destroy_process_group(ring.group)
        with self._waking:
            os.close(self._wake)
            self._wake = -1

    def _watch(self, descriptor: int, look: Callable[[], bool]) -> None:
        """Have `until` call `look` when `descriptor` is ready, until it returns False."""
        self._polled[descriptor] = look
        self._poll.register(descriptor, select.POLLIN)


class RoutedMessages:
    """Messages of channels inside the node through shared memory, and of all others through `others`, which calls
    `shared.wake` at each arrival."""

    def __init__(self, shared: SharedMemoryMessages, inside: frozenset[Channel], others: Messages) -> None:
        """inside: the channels of `shared`."""
        self._shared, self._inside, self._others = shared, inside, others
        self.posting = others.posting

    def receive(self, channel: Channel, values: Tensor) -> Request:
        """See Messages."""
        return self._by(channel).receive(channel, values)

    def send(self, channel: Channel, values: Tensor) -> Request:
        """See Messages."""
        return self._by(channel).send(channel, values)

    def until(self, condition: Callable[[], bool]) -> None:
        """See Messages."""
        self._shared.until(condition)

    @property
    def nbytes(self) -> int:
        """See Messages."""
        return self._shared.nbytes

    def close(self) -> None:
        """See Messages."""
        self._others.close()
        self._shared.close()

    def _by(self, channel: Channel) -> Messages:
        return self._shared if channel in self._inside else self._others


class _Incoming:
    """The receiving end of a channel: slots that the sender has filled, and posted receives."""

    def __init__(self, ring: Ring) -> None:
        self._slots, self._pipes = list(ring.theirs), ring.pipes
        self._filled: deque[int] = deque()
        self.posted: deque[_Receive] = deque()

    @property
    def lost(self) -> bool:
        """Whether the sender has ended and all that it had sent has been taken."""
        return self._pipes.ended and not self._filled

    def look(self) -> bool:
        """Record which slots have been filled; return whether more may come."""
        self._filled.extend(self._pipes.read())
        return not self._pipes.ended

    def take(self) -> None:
        """Copy filled slots into posted receives, in order, and free them."""
        self.look()
        while self._filled and self.posted:
            receive, slot = self.posted[0], self._filled.popleft()
            part = receive.left[: len(self._slots[slot])]
            np.copyto(part, self._slots[slot][: len(part)])
            receive.left = receive.left[len(part) :]
            if not len(receive.left):
                self.posted.popleft()
            try:
                self._pipes.write(slot)
            except BrokenPipeError:
                # The sender has ended after its last message.
                continue


class _Receive:
    """A posted receive. left: the part of its memory that the message has not reached yet."""

    def __init__(self, incoming: _Incoming, left: SlotBytes, until: Callable[[Callable[[], bool]], None]) -> None:
        self._incoming, self.left, self._until = incoming, left, until
        incoming.posted.append(self)

    def is_completed(self) -> bool:
        if len(self.left):
            self._incoming.take()
        return not len(self.left) or self._incoming.lost

    def wait(self) -> None:
        self._until(self.is_completed)
        if len(self.left):
            raise _lost()


class _Outgoing:
    """The sending end of a channel: its free slots, and sends that wait for one."""

    def __init__(self, ring: Ring) -> None:
        self._slots, self._pipes = list(ring.own), ring.pipes
        # The slot that was freed last is taken first: the processor's caches still have it.
        self._free = list(reversed(range(len(self._slots))))
        self._queue: deque[_Send] = deque()
        self._changed = Condition()
        self._thread: Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether no thread waits for free slots."""
        return self._thread is None

    def send(self, values: SlotBytes) -> Request:
        """Send a message; what does not fit into free slots now follows by itself."""
        with self._changed:
            send = _Send(values, self._changed)
            self._queue.append(send)
            if self._thread is None and not self._fill():
                self._thread = Thread(target=self._follow, name="pipeline", daemon=True)
                self._thread.start()
        return send

    def _follow(self) -> None:
        """Fill slots as they become free, until no send is left."""
        freed = select.poll()
        freed.register(self._pipes, select.POLLIN)
        while True:
            freed.poll()
            with self._changed:
                if self._fill():
                    self._thread = None
                    return

    def _fill(self) -> bool:
        """Copy messages into free slots, in order; return whether all are done. The caller holds the lock."""
        self._free.extend(self._pipes.read())
        try:
            while self._queue and self._free and not self._pipes.ended:
                send, slot = self._queue[0], self._free.pop()
                part = send.left[: len(self._slots[slot])]
                np.copyto(self._slots[slot][: len(part)], part)
                self._pipes.write(slot)
                send.left = send.left[len(part) :]
                if not len(send.left):
                    self._queue.popleft()
        except BrokenPipeError:
            self._pipes.ended = True
        if self._pipes.ended:
            for send in self._queue:
                send.lost = True
            self._queue.clear()
        self._changed.notify_all()
        return not self._queue


class _Send:
    """A send. left: the part of the message that is in no slot yet. lost: whether the receiver has ended."""

    def __init__(self, left: SlotBytes, changed: Condition) -> None:
        self.left, self.lost, self._changed = left, False, changed

    def is_completed(self) -> bool:
        return self.lost or not len(self.left)

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(self.is_completed)
        if self.lost:
            raise _lost()


def _bytes(values: Tensor) -> SlotBytes:
    """Return a contiguous tensor's memory as uint8 `[n]`: numpy does not know all dtypes."""
    return values.view(-1).view(torch.uint8).numpy()


def _lost() -> RuntimeError:
    """Return what gloo raises when a connection ends."""
    return RuntimeError("Connection closed by peer")
