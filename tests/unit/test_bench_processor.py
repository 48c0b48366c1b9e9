"""The benchmarks' emulated processor takes exactly the given time, whatever its host does meanwhile."""

import pytest
import torch
from llmtrain.comm.messages import Channel

from tools.bench import processor as module
from tools.bench.processor import Processor

BELOW = Channel(0, 1)


class Clock:
    """A clock that moves only when a test says so, and the messages that have arrived."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.there = 100.0, set[Channel]()
        monkeypatch.setattr(module, "perf_counter", lambda: self.now)
        monkeypatch.setattr(module, "sleep", self.host)
        self.processor = Processor(lambda: set(self.there))
        self.processor.begin()

    def host(self, seconds: float) -> None:
        """Let the host work, or sleep."""
        self.now += seconds

    def receive(self, seconds: float) -> None:
        """Receive a message `seconds` after the request."""

        def receive(channel: Channel) -> torch.Tensor:
            self.now += seconds
            return torch.zeros(1)

        self.processor.receive(BELOW, receive)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_host_s_own_work_takes_none_of_its_time(clock: Clock) -> None:
    for _ in range(3):
        clock.host(2.0)
        clock.processor.work(6.0)
    assert clock.now == 118.0


def test_what_is_handed_to_it_late_ends_late(clock: Clock) -> None:
    clock.host(10.0)
    clock.processor.work(6.0)
    assert clock.now == 110.0
    clock.processor.work(6.0)
    assert clock.now == 116.0


def test_it_does_not_begin_before_a_message_is_there(clock: Clock) -> None:
    clock.processor.work(6.0)
    clock.host(1.0)
    clock.receive(4.0)
    clock.processor.work(6.0)
    assert clock.now == 117.0


def test_a_message_that_was_there_when_it_was_done_holds_nothing_up(clock: Clock) -> None:
    clock.there = {BELOW}
    clock.processor.work(6.0)
    clock.host(1.0)
    clock.receive(0.0)
    clock.processor.work(6.0)
    assert clock.now == 112.0
    # The next message had not arrived.
    clock.there = set()
    clock.processor.work(6.0)
    clock.host(1.0)
    clock.receive(0.0)
    clock.processor.work(6.0)
    assert clock.now == 125.0


def test_a_step_begins_when_it_does(clock: Clock) -> None:
    clock.host(50.0)
    clock.processor.begin()
    clock.processor.work(6.0)
    assert clock.now == 156.0
