"""Gathers and reductions under way keep their order, their buffers, and errors."""

from typing import cast

import pytest
import torch
from llmtrain.sharding.collectives import Stage
from llmtrain.sharding.hops import Hop
from llmtrain.sharding.in_flight import Flights
from llmtrain.sharding.stream import Lane, ThreadLane
from llmtrain.sharding.workspace import Scratch


class OnLane:
    """The part of a hop that flights need."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane


def stage(lane: Lane, job: object) -> Stage:
    return Stage(cast(Hop, OnLane(lane)), job)  # type: ignore[arg-type]


def test_all_buffers_have_grown_when_each_size_was_seen() -> None:
    """Whichever flight a large unit meets later, there is nothing to allocate."""
    lane, flights = ThreadLane("test"), Flights(torch.device("cpu"), 3)

    def start(numel: int) -> None:
        def build(flight: Scratch) -> list[Stage]:
            flight.take("sum", numel, torch.float32)
            return [stage(lane, lambda: None)]

        flights.start(build)

    for numel in (100, 10):
        start(numel)
    held = flights.nbytes
    assert held == 3 * 400
    for _ in range(5):
        start(100)
        start(10)
        assert flights.nbytes == held
    lane.close()


def test_a_stage_waits_for_the_one_before_and_for_the_flight_whose_buffers_it_takes() -> None:
    lanes, flights, done = [ThreadLane("a"), ThreadLane("b")], Flights(torch.device("cpu"), 2), []
    for number in range(20):

        def build(flight: Scratch, number: int = number) -> list[Stage]:
            held = flight.take("value", 1, torch.float32)
            return [
                stage(lanes[number % 2], lambda: held.fill_(number)),
                stage(lanes[(number + 1) % 2], lambda: done.append(int(held))),
            ]

        last = flights.start(build)[-1]
    last.wait()
    assert sorted(done) == list(range(20))
    for lane in lanes:
        lane.close()


def test_an_error_reaches_who_waits_and_all_that_follow() -> None:
    lane, flights = ThreadLane("test"), Flights(torch.device("cpu"), 1)

    def fail() -> None:
        raise OSError("the link is down")

    broken = flights.start(lambda flight: [stage(lane, fail), stage(lane, lambda: None)])
    follows = flights.start(lambda flight: [stage(lane, lambda: None)])
    for ticket in (*broken, *follows):
        with pytest.raises(OSError, match="the link is down"):
            ticket.wait()
    lane.close()
