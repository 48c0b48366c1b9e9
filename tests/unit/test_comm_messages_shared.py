"""Messages through shared memory: order, sizes, full slots, waiting, and a rank that ends."""

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from llmtrain.comm.messages import Channel
from llmtrain.comm.messages_gloo import GlooMessages
from llmtrain.comm.messages_shared import Ring, RoutedMessages, SharedMemoryMessages
from llmtrain.comm.pipes import Pipes
from llmtrain.parallel.pipeline.transport import Transport
from llmtrain.plan.per_rank.message_buffers import MOST_SLOTS

CHANNEL, BACK = Channel(0, 1), Channel(1, 0)
SLOTS, WIDTH = 3, 64
# Messages below one slot, of whole slots, and of more than all slots.
SIZES = (1, 15, 16, 17, 32, 3 * 16, 7 * 16 + 5)


def ends(channel: Channel = CHANNEL, slots: int = SLOTS) -> tuple[Ring, Ring]:
    """Return the sender's and the receiver's end of a channel; both are in this process."""
    memory = [np.zeros((slots, WIDTH), np.uint8) for _ in range(2)]
    there, back = os.pipe(), os.pipe()
    for reading, _ in (there, back):
        os.set_blocking(reading, False)
    group: dist.ProcessGroup = None  # type: ignore[assignment]
    return (
        Ring(group, memory[0], memory[1], Pipes(back[0], there[1])),
        Ring(group, memory[1], memory[0], Pipes(there[0], back[1])),
    )


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SharedMemoryMessages, SharedMemoryMessages]]:
    """Return the messages of a sender and of a receiver, with a channel in each direction."""
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    (ours, theirs), (answering, answered) = ends(), ends()
    sender = SharedMemoryMessages({CHANNEL: ours, BACK: answered})
    receiver = SharedMemoryMessages({CHANNEL: theirs, BACK: answering})
    yield sender, receiver
    sender.close()
    receiver.close()


Both = tuple[SharedMemoryMessages, SharedMemoryMessages]


def numbered(number: int, size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) + 1000 * number


def receive(messages: SharedMemoryMessages, size: int) -> torch.Tensor:
    values = torch.empty(size)
    messages.receive(CHANNEL, values).wait()
    return values


def test_messages_of_any_size_arrive_in_order(both: Both) -> None:
    """Both ends pause at times, so that slots are full at some moments and empty at others."""
    sender, receiver = both
    sizes = random.Random(0).choices(SIZES, k=300)

    def send() -> None:
        chance = random.Random(1)
        for number, size in enumerate(sizes):
            sender.send(CHANNEL, numbered(number, size))
            if chance.random() < 0.05:
                time.sleep(0.002)

    with ThreadPoolExecutor(1) as other:
        sending, chance = other.submit(send), random.Random(2)
        for number, size in enumerate(sizes):
            assert torch.equal(receive(receiver, size), numbered(number, size))
            if chance.random() < 0.05:
                time.sleep(0.002)
        sending.result()


def test_receives_posted_ahead_are_filled_in_order(both: Both) -> None:
    sender, receiver = both
    values = [torch.empty(size) for size in SIZES]
    requests = [receiver.receive(CHANNEL, each) for each in values]
    for number, size in enumerate(SIZES):
        assert not requests[number].is_completed()
        sender.send(CHANNEL, numbered(number, size))
        receiver.until(requests[number].is_completed)
        requests[number].wait()
        assert torch.equal(values[number], numbered(number, size))


def test_a_send_holds_nothing_up(both: Both) -> None:
    """Sends are complete while there are free slots. The others follow, whatever the sender's thread does."""
    (sender, receiver), others = both, threading.enumerate()
    requests = [sender.send(CHANNEL, numbered(number, 16)) for number in range(SLOTS + 4)]
    assert [request.is_completed() for request in requests] == [True] * SLOTS + [False] * 4
    for number in range(SLOTS + 4):
        assert torch.equal(receive(receiver, 16), numbered(number, 16))
    for request in requests:
        request.wait()
    for thread in threading.enumerate():
        if thread.name == "pipeline" and thread not in others:
            thread.join(20)
            assert not thread.is_alive()
    assert sender.nbytes == SLOTS * WIDTH
    assert receiver.nbytes == 0


def test_a_message_that_was_sent_may_change_at_once(both: Both) -> None:
    sender, receiver = both
    values = numbered(1, 16)
    assert sender.send(CHANNEL, values).is_completed()
    values.zero_()
    assert torch.equal(receive(receiver, 16), numbered(1, 16))


def test_other_dtypes(both: Both) -> None:
    sender, receiver = both
    sent = torch.randn(2, 3, 5).to(torch.bfloat16)
    received = torch.empty_like(sent)
    sender.send(CHANNEL, sent)
    receiver.receive(CHANNEL, received).wait()
    assert torch.equal(received, sent)


def test_a_wait_sleeps(both: Both) -> None:
    """Neither a wait for nothing nor messages of a channel that nobody asks for keep a core busy."""
    sender, receiver = both
    values = torch.empty(1)
    receiver.receive(BACK, torch.empty(1))
    request = receiver.receive(CHANNEL, values)
    sender.send(BACK, numbered(0, 16))
    late = threading.Timer(0.5, lambda: sender.send(CHANNEL, numbered(1, 1)))
    began, busy = time.perf_counter(), time.thread_time()
    late.start()
    receiver.until(request.is_completed)
    assert time.perf_counter() - began > 0.4
    assert time.thread_time() - busy < 0.1
    assert values.item() == 1000
    late.join()


def hang_up(ring: Ring) -> None:
    """Do to the other end what the end of this process would do."""
    ring.pipes.close()


def test_a_sender_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has sent arrives. Then whoever waits is told; the rank itself is not, as it may need nothing more."""
    ours, theirs = ends()
    sender, receiver = SharedMemoryMessages({CHANNEL: ours}), SharedMemoryMessages({CHANNEL: theirs})
    sender.send(CHANNEL, numbered(0, 16))
    missing = receiver.receive(CHANNEL, torch.empty(16)), receiver.receive(CHANNEL, torch.empty(16))
    hang_up(ours)
    missing[0].wait()
    receiver.until(missing[1].is_completed)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        missing[1].wait()
    theirs.pipes.close()


def test_a_sender_that_ends_ends_no_other_wait(both: Both) -> None:
    sender, receiver = both
    ours, theirs = ends()
    third = Channel(2, 1)
    receiver = SharedMemoryMessages({**receiver._rings, third: theirs})
    receiver.receive(third, torch.empty(1))
    request = receiver.receive(CHANNEL, torch.empty(1))
    hang_up(ours)
    late = threading.Timer(0.3, lambda: sender.send(CHANNEL, numbered(1, 1)))
    late.start()
    busy = time.thread_time()
    request.wait()
    assert time.thread_time() - busy < 0.1
    late.join()
    theirs.pipes.close()


def test_a_receiver_that_ends() -> None:
    """Sends that wait for slots fail, and so do later ones."""
    ours, theirs = ends()
    sender = SharedMemoryMessages({CHANNEL: ours})
    waiting = sender.send(CHANNEL, numbered(0, 16 * SLOTS + 1))
    assert not waiting.is_completed()
    hang_up(theirs)
    for request in (waiting, sender.send(CHANNEL, numbered(1, 1))):
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            request.wait()
        assert request.is_completed()
    ours.pipes.close()


def test_the_last_message_of_a_sender_that_has_left() -> None:
    """A rank that is done closes its end while its last messages are unread."""
    ours, theirs = ends()
    SharedMemoryMessages({CHANNEL: ours}).send(CHANNEL, numbered(0, 40))
    hang_up(ours)
    assert torch.equal(receive(SharedMemoryMessages({CHANNEL: theirs}), 40), numbered(0, 40))
    theirs.pipes.close()


def test_a_pipe_holds_the_numbers_of_all_slots() -> None:
    """A pipe of one page is what Linux gives to a user with many pipes; a write into a full pipe would block."""
    ours, theirs = ends()
    for number in range(MOST_SLOTS):
        ours.pipes.write(number)
    assert list(theirs.pipes.read()) == list(range(MOST_SLOTS))
    assert os.sysconf("SC_PAGE_SIZE") >= 2 * MOST_SLOTS
    for ring in (ours, theirs):
        ring.pipes.close()


def test_a_late_wake_writes_to_no_other_file(tmp_path: Path) -> None:
    """A thread that waits for other nodes may wake a rank that has closed its messages."""
    messages = SharedMemoryMessages({})
    number = messages._wake
    messages.close()
    other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
    os.dup2(other, number)
    messages.wake()
    for descriptor in {other, number}:
        os.close(descriptor)
    assert not (tmp_path / "other").read_bytes()


class Work:
    """The work of a receive over gloo that completes when a test says so."""

    def __init__(self) -> None:
        self.there = threading.Event()

    def wait(self) -> None:
        assert self.there.wait(20)


@pytest.mark.parametrize("first", ["inside", "outside"])
def test_a_rank_waits_for_other_nodes_too(first: str, both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = both
    work, outside = Work(), Channel(2, 1)
    monkeypatch.setattr(dist, "irecv", lambda values, peer, group: work)
    others = GlooMessages({outside: (None, 0)}, 2, receiver.wake)  # type: ignore[dict-item]
    transport = Transport(RoutedMessages(receiver, frozenset([CHANNEL]), others), torch.float32, torch.device("cpu"))
    for channel in (CHANNEL, outside):
        transport.expect(channel, [torch.Size((1,))])
        assert not transport.arrived(channel)
    comes = {"inside": lambda: sender.send(CHANNEL, numbered(1, 1)), "outside": work.there.set}
    late = threading.Timer(0.3, comes[first])
    late.start()
    busy = time.thread_time()
    transport.wait_any([CHANNEL, outside])
    assert time.thread_time() - busy < 0.1
    assert [transport.arrived(channel) for channel in (CHANNEL, outside)] == [first == "inside", first == "outside"]
    work.there.set()
    late.join()
