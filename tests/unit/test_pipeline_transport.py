"""A transport posts receives before they are needed, and knows which messages have arrived."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.arrivals import Arrivals
from llmtrain.comm.messages import Channel
from llmtrain.comm.messages_gloo import GlooMessages
from llmtrain.comm.messages_nccl import NcclMessages
from llmtrain.comm.posted_receives import PostedReceives
from llmtrain.comm.ranks import Ranks
from llmtrain.parallel.pipeline.transport import Transport
from llmtrain.plan.facts import Facts
from llmtrain.plan.program.posted_receives import Posting, posting_of
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import parse_recipe
from llmtrain.recipe.pipeline import ScheduleName
from llmtrain.training import build_pipeline

CHANNEL = Channel(0, 1)
RECIPE = {
    "name": "tiny",
    "model": {"family": "gpt2", "layers": 8, "hidden": 32, "heads": 4, "vocab": 64},
    "data": {"path": "set", "sequence_length": 16},
    "train": {"steps": 200, "global_batch": 16, "microbatch": 1},
    "parallel": {"pipeline": 4},
}


class Message:
    """The work of a message, which arrives, or whose sender is lost, when a test says so."""

    def __init__(self, values: torch.Tensor) -> None:
        self.numbers, self.awaited, self.there, self.lost = values.numel(), Event(), Event(), False

    def wait(self) -> None:
        self.awaited.set()
        assert self.there.wait(20)
        if self.lost:
            raise RuntimeError("Connection closed by peer")


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Message]]:
    """Return the messages posted so far, in order."""
    messages: list[Message] = []

    def irecv(values: torch.Tensor, peer: int, group: object) -> Message:
        messages.append(Message(values))
        return messages[-1]

    monkeypatch.setattr(dist, "irecv", irecv)
    yield messages
    for message in messages:
        message.there.set()


def expecting(count: int, ahead: int, posting: Posting | None = None) -> Transport:
    """Return a transport that expects messages of 1, 2, 3... elements."""
    messages = GlooMessages({CHANNEL: (None, 0)}, ahead)  # type: ignore[dict-item]
    messages.posting = posting or messages.posting
    transport = Transport(messages, torch.float32, torch.device("cpu"))
    transport.expect(CHANNEL, [torch.Size((number,)) for number in range(1, count + 1)])
    return transport


def test_as_many_receives_are_posted_as_messages_are_under_way(posted: list[Message]) -> None:
    """With fewer posted receives, gloo holds a message back until its sender knows of the receive, a round trip
    later."""
    transport = expecting(5, 3)
    assert [message.numbers for message in posted] == [1, 2, 3]
    for number in range(5):
        posted[number].there.set()
        assert transport.receive(CHANNEL).numel() == number + 1
        assert [message.numbers for message in posted] == [1, 2, 3, 4, 5][: number + 4]


class Streams:
    """torch.cuda's streams and events, which note on which one what is called. Events are the numbers of calls."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.current = "computation"

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            record_event=lambda: len(self.calls),
            wait_event=lambda number: self.calls.append(f"{name} after call {number}"),
        )

    @contextmanager
    def using(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.stream("channel"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams.stream(streams.current))
    monkeypatch.setattr(torch.cuda, "stream", streams.using)
    monkeypatch.setattr(NcclMessages, "_connect", lambda self: None)

    def irecv(values: torch.Tensor, peer: int, group: object) -> SimpleNamespace:
        number = values.numel()
        streams.calls.append(f"receive {number} on {streams.current}")
        return SimpleNamespace(wait=lambda: streams.calls.append(f"{streams.current} waits for {number}"))

    monkeypatch.setattr(dist, "irecv", irecv)
    return streams


def test_nccl_receives_when_a_message_is_needed_beside_the_computation(streams: Streams) -> None:
    """A posted receive occupies multiprocessors, and depends only on what was launched. It comes after what the GPU had
    to compute when its memory was allocated, as the message before was taken."""
    cpu = torch.device("cpu")
    transport = Transport(NcclMessages({CHANNEL: (None, 0)}, cpu), torch.float32, cpu)  # type: ignore[dict-item]
    transport.expect(CHANNEL, [torch.Size((number,)) for number in (1, 2, 3)])
    assert not streams.calls
    for number in (1, 2, 3):
        assert transport.receive(CHANNEL).numel() == number
        streams.calls.append("layers")
    assert streams.calls == [
        *("channel after call 0", "receive 1 on channel", "computation waits for 1", "layers"),
        *("channel after call 0", "receive 2 on channel", "computation waits for 2", "layers"),
        *("channel after call 4", "receive 3 on channel", "computation waits for 3", "layers"),
    ]


def test_nccl_holds_the_first_sends_until_their_receives_are_posted(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the first three; the third does not overtake them."""
    calls, store, cpu = list[int](), dist.HashStore(), torch.device("cpu")

    def isend(values: torch.Tensor, peer: int, group: object) -> SimpleNamespace:
        calls.append(values.numel())
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    monkeypatch.setattr(dist, "isend", isend)
    sender, receiver = (
        PostedReceives(store, rank, {CHANNEL: 1 - rank}, announced=2, patience=timedelta(minutes=1)) for rank in (0, 1)
    )
    messages = NcclMessages({CHANNEL: (None, 1)}, cpu, sender)  # type: ignore[dict-item]
    first, second, third = (messages.send(CHANNEL, torch.zeros(number)) for number in (1, 2, 3))
    assert not first.is_completed()
    receiver.tell(CHANNEL)
    first.wait()
    assert calls == [1]
    assert not second.is_completed()
    receiver.tell(CHANNEL)
    third.wait()
    assert second.is_completed()
    messages.send(CHANNEL, torch.zeros(4)).wait()
    assert calls == [1, 2, 3, 4]
    assert streams.calls == ["channel after call 0"] * 3
    assert store.num_keys() == 0


def test_receivers_need_no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that holds the store has so many files at most."""
    store, cloned = dist.HashStore(), list[object]()
    monkeypatch.setattr(dist.HashStore, "clone", lambda self: cloned.append(self) or self)
    posted = PostedReceives(store, 0, {CHANNEL: 1}, announced=1, patience=timedelta(minutes=1))
    posted.tell(CHANNEL)
    assert not cloned
    assert [posted.next(CHANNEL) is None for _ in range(3)] == [False, True, True]
    assert cloned == [store]


def test_nccl_sends_nothing_after_a_send_that_failed(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver would take the second message for the first. Who waits hears of the error."""
    calls, cpu = list[int](), torch.device("cpu")
    monkeypatch.setattr(dist, "isend", lambda values, peer, group: calls.append(values.numel()))
    sender = PostedReceives(dist.HashStore(), 0, {CHANNEL: 1}, announced=1, patience=timedelta(milliseconds=1))
    messages = NcclMessages({CHANNEL: (None, 1)}, cpu, sender)  # type: ignore[dict-item]
    sends = [messages.send(CHANNEL, torch.zeros(number)) for number in (1, 2)]
    for send in sends:
        with pytest.raises(RuntimeError, match=r"[Tt]imeout"):
            send.wait()
        assert send.is_completed()
    with pytest.raises(RuntimeError, match=r"[Tt]imeout"):
        messages.send(CHANNEL, torch.zeros(3)).wait()
    assert calls == []


@pytest.mark.parametrize(("posting", "early"), [(posting_of("nccl", 1), 0), (posting_of("gloo", 3), 1)])
def test_nccl_looks_for_no_message_that_nobody_asks_for(
    posting: Posting, early: int, posted: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next message may depend on what the rank has yet to launch. gloo looks for it while the rank computes."""
    watched, watch = list[Channel](), Arrivals.watch

    def noted(self: Arrivals, channel: Channel, wait: Callable[[], object]) -> object:
        watched.append(channel)
        return watch(self, channel, wait)

    monkeypatch.setattr(Arrivals, "watch", noted)
    transport = expecting(3, 0, posting)
    for number in range(3):
        assert not transport.arrived(CHANNEL)
        posted[number].there.set()
        assert transport.receive(CHANNEL).numel() == number + 1
        assert len(watched) == min(number + 1 + early, 3)


class Sent:
    """A send that completes when somebody waits for it, as gloo's do."""

    def __init__(self) -> None:
        self.over = False

    def is_completed(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.over = True


def test_a_gradient_releases_the_activation_that_it_answers(
    posted: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    sends: list[Sent] = []
    monkeypatch.setattr(dist, "isend", lambda values, peer, group: sends.append(Sent()) or sends[-1])
    back = Channel(1, 0)
    messages = GlooMessages({CHANNEL: (None, 0), back: (None, 0)}, 2)  # type: ignore[dict-item]
    transport = Transport(messages, torch.float32, torch.device("cpu"))
    for _ in range(2):
        transport.expect(back, [torch.Size((1,))] * 3)
        for _ in range(3):
            transport.send(CHANNEL, torch.ones(1))
        # The first send completes before its answer arrives.
        sends[0].over = True
        transport.progress()
        for answers in (1, 2):
            posted[answers - 1].there.set()
            transport.receive(back)
            assert [send.over for send in sends] == [place < answers for place in range(3)]
        posted[2].there.set()
        transport.receive(back)
        transport.flush()
        assert all(send.over for send in sends)
        sends.clear()
        posted.clear()


def test_a_message_that_comes_during_a_computation_is_there_after_it(posted: list[Message]) -> None:
    transport = expecting(3, 2)
    assert not transport.arrived(CHANNEL)
    posted[0].there.set()
    transport.receive(CHANNEL)
    # No one asks for the next message during a computation.
    assert posted[1].awaited.wait(20)
    assert not posted[2].awaited.is_set()
    assert not transport.arrived(CHANNEL)
    posted[1].there.set()
    transport.wait_any([CHANNEL])
    assert transport.arrived(CHANNEL)


def test_a_message_that_never_comes_holds_up_no_process(posted: list[Message]) -> None:
    """A rank that crashes must end, because other ranks wait for its messages."""
    transport = expecting(1, 1)
    transport.arrived(CHANNEL)
    waiting = [thread for thread in threading.enumerate() if thread.name == "pipeline"]
    assert waiting
    assert all(thread.daemon for thread in waiting)


def test_a_sender_that_goes_is_known_to_who_waits(posted: list[Message]) -> None:
    transport = expecting(1, 1)
    transport.arrived(CHANNEL)
    posted[0].lost = True
    posted[0].there.set()
    transport.wait_any([CHANNEL])
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        transport.receive(CHANNEL)


@pytest.mark.parametrize(
    ("schedule", "chunks", "limit", "ahead"),
    [
        ("1f1b", 1, "auto", 4),
        ("gpipe", 1, "auto", 16),
        ("interleaved", 2, "auto", 6),
        ("message-driven", 1, 7, 7),
        ("message-driven", 1, 1, 2),
    ],
)
def test_a_run_posts_as_many_as_its_schedule_has_under_way(
    schedule: ScheduleName, chunks: int, limit: int | str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, ...]] = []
    monkeypatch.setattr(build_pipeline, "join_group", lambda ranks, members, ctas: None)
    monkeypatch.setattr(build_pipeline, "messages_of", lambda peers, device, node, *sizes: given.append(sizes[:2]))
    keys = {"schedule": schedule, "chunks": chunks, "limit": limit}
    facts = Facts(world=4, device="cpu", ranks_per_node=4)
    plan = make_plan(parse_recipe({**RECIPE, "pipeline": keys}), facts)
    ranks = Ranks(0, 0, Layout({Axis.PIPELINE: 4}), torch.device("cpu"))
    build_pipeline._links(plan, ranks, lambda traffic: None)
    assert given == [(ahead, 1 * 16 * 32 * 4)]
