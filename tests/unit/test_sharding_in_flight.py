"""Gathers and reductions in flight keep their order, their buffers, and errors."""

import pytest
import torch
from llmtrain.comm.stream import Job, Stream, ThreadStream
from llmtrain.comm.workspace import Workspace
from llmtrain.sharding.collectives import HopStep
from llmtrain.sharding.in_flight import InFlight

CPU = torch.device("cpu")


def step(stream: Stream, job: Job) -> HopStep:
    return HopStep(stream, job)


def test_every_workspace_has_room_for_the_largest_unit() -> None:
    """Whichever workspace a large unit gets, nothing is allocated, and nothing larger than planned is taken."""
    stream, in_flight = ThreadStream("test"), InFlight(CPU, 3, {"sum": 400})

    def start(numel: int) -> None:
        def build(slot: Workspace) -> list[HopStep]:
            slot.take("sum", numel, torch.float32)
            return [step(stream, lambda: None)]

        in_flight.start(build)

    for numel in (100, 10, 100, 100, 10):
        start(numel)
        assert in_flight.nbytes == 3 * 400
    with pytest.raises(RuntimeError, match="the buffer 'sum' was planned with 400 bytes, but 404 are taken"):
        start(101)
    stream.close()


def test_a_buffer_that_nobody_planned() -> None:
    with pytest.raises(RuntimeError, match="the buffer 'other' was planned with 0 bytes, but 1 are taken"):
        Workspace(CPU, {"sum": 400}).take("other", 1, torch.uint8)


def test_a_hop_waits_for_the_one_before_and_for_the_last_user_of_its_slot() -> None:
    streams, in_flight, done = [ThreadStream("a"), ThreadStream("b")], InFlight(CPU, 2, {"value": 4}), []
    for number in range(20):

        def build(slot: Workspace, number: int = number) -> list[HopStep]:
            held = slot.take("value", 1, torch.float32)
            return [
                step(streams[number % 2], lambda: held.fill_(number)),
                step(streams[(number + 1) % 2], lambda: done.append(int(held))),
            ]

        last = in_flight.start(build)[-1]
    last.wait()
    assert sorted(done) == list(range(20))
    for stream in streams:
        stream.close()


def test_an_error_reaches_who_waits_and_all_that_follow() -> None:
    stream, in_flight = ThreadStream("test"), InFlight(CPU, 1, {})

    def fail() -> None:
        raise OSError("the link is down")

    broken = in_flight.start(lambda slot: [step(stream, fail), step(stream, lambda: None)])
    follows = in_flight.start(lambda slot: [step(stream, lambda: None)])
    for ticket in (*broken, *follows):
        with pytest.raises(OSError, match="the link is down"):
            ticket.wait()
    stream.close()


def test_later_jobs_of_a_failed_stream_raise_what_failed() -> None:
    """A job that relies on one that failed does not run, so its own error never hides the cause."""
    stream, ran = ThreadStream("test"), list[int]()

    def lost() -> None:
        raise ConnectionError("a rank is lost")

    tickets = [stream.submit(lambda: ran.append(1)), stream.submit(lost), stream.submit(lambda: ran.append(2))]
    tickets[0].wait()
    for ticket in tickets[1:]:
        with pytest.raises(ConnectionError, match="a rank is lost"):
            ticket.wait()
    assert ran == [1]
    stream.close()
