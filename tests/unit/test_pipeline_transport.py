"""What a transport posts before it is needed, and how it knows what is there."""

import threading
from collections.abc import Iterator
from threading import Event

import pytest
import torch
import torch.distributed as dist
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import Ranks
from llmtrain.parallel.pipeline.transport import Channel, TorchTransport
from llmtrain.plan.make import make_plan
from llmtrain.plan.resolve import Facts, resolve
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
    """The work of a message, which comes when it is told to, or whose sender goes."""

    def __init__(self, values: torch.Tensor) -> None:
        self.numbers, self.awaited, self.there, self.lost = values.numel(), Event(), Event(), False

    def wait(self) -> None:
        self.awaited.set()
        assert self.there.wait(20)
        if self.lost:
            raise RuntimeError("Connection closed by peer")


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Message]]:
    """What was posted so far, in order."""
    messages: list[Message] = []

    def irecv(values: torch.Tensor, peer: int, group: object) -> Message:
        messages.append(Message(values))
        return messages[-1]

    monkeypatch.setattr(dist, "irecv", irecv)
    yield messages
    for message in messages:
        message.there.set()


def expecting(count: int, ahead: int) -> TorchTransport:
    """Return a transport that expects messages of 1, 2 and so on numbers."""
    transport = TorchTransport(
        {CHANNEL: (None, 0)},  # type: ignore[dict-item]
        torch.device("cpu"),
        torch.float32,
        ahead,
    )
    transport.expect(CHANNEL, [torch.Size((number,)) for number in range(1, count + 1)])
    return transport


def test_as_many_receives_are_posted_as_messages_are_under_way(posted: list[Message]) -> None:
    """Where fewer are, gloo holds a message back until its sender has heard of the receive, a round trip later."""
    transport = expecting(5, 3)
    assert [message.numbers for message in posted] == [1, 2, 3]
    for number in range(5):
        posted[number].there.set()
        assert transport.receive(CHANNEL).numel() == number + 1
        assert [message.numbers for message in posted] == [1, 2, 3, 4, 5][: number + 4]


def test_a_message_that_comes_during_a_computation_is_there_after_it(posted: list[Message]) -> None:
    transport = expecting(3, 2)
    assert not transport.arrived(CHANNEL)
    posted[0].there.set()
    transport.receive(CHANNEL)
    # Nobody asks for the next one while something is computed.
    assert posted[1].awaited.wait(20)
    assert not posted[2].awaited.is_set()
    assert not transport.arrived(CHANNEL)
    posted[1].there.set()
    transport.wait_any([CHANNEL])
    assert transport.arrived(CHANNEL)


def test_a_message_that_never_comes_holds_up_no_process(posted: list[Message]) -> None:
    """One that crashes ends, or those that wait for what it would have sent never do."""
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
    given: list[int] = []
    monkeypatch.setattr(build_pipeline, "join_group", lambda ranks, members: None)
    monkeypatch.setattr(build_pipeline, "TorchTransport", lambda peers, device, dtype, ahead: given.append(ahead))
    keys = {"schedule": schedule, "chunks": chunks, "limit": limit}
    facts = Facts(4, "cpu", 4)
    plan = make_plan(resolve(parse_recipe({**RECIPE, "pipeline": keys}), facts), facts)
    ranks = Ranks(0, 0, Layout({Axis.PIPELINE: 4}), torch.device("cpu"))
    build_pipeline._transport(plan, ranks)
    assert given == [ahead]
