"""Gathers and reductions in flight keep their order, their buffers, and errors."""

import threading

import pytest
import torch
from llmtrain.comm.stream import Job, Stream, ThreadStream
from llmtrain.comm.waits import Done, Ticket
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


class DeviceStream:
    """Runs a job when it is submitted, as a GPU's stream does: if the job waits for a thread, the host does."""

    blocks = False

    def submit(self, job: Job) -> Done:
        """Run `job`."""
        job()
        return Done()

    def close(self) -> None:
        """Do nothing."""


def test_the_host_does_not_wait_for_a_thread_until_the_next_one_starts() -> None:
    thread, device, in_flight = ThreadStream("test"), DeviceStream(), InFlight(CPU, 2, {})
    thread.blocks = True
    come, done = [threading.Event() for _ in range(3)], list[str]()

    def start(number: int) -> Ticket:
        def build(slot: Workspace) -> list[HopStep]:
            return [
                step(device, lambda: done.append(f"sent {number}")),
                step(thread, come[number].wait),
                step(device, lambda: done.append(f"summed {number}")),
                step(thread, lambda: done.append(f"put {number}")),
            ]

        return in_flight.start(build)[-1]

    first = start(0)
    assert done == ["sent 0"]
    come[0].set()
    second = start(1)
    assert [one for one in done if one != "put 0"] == ["sent 0", "summed 0", "sent 1"]
    come[1].set()
    second.wait()
    first.wait()
    assert done[-2:] == ["summed 1", "put 1"]
    # What was waited for is not queued once more.
    third = start(2)
    come[2].set()
    third.wait()
    assert len(done) == 9
    thread.close()


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
