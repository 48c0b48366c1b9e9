"""Measured waits of a CUDA stream, on events that know a clock's time."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llmtrain.comm.stalls import StreamStalls


class TimedEvent:
    """An event of a GPU whose clock the test moves."""

    def __init__(self, gpu: SimpleNamespace) -> None:
        self._gpu, self.at = gpu, 0.0

    def record(self, stream: str) -> None:
        assert stream == "main"
        self.at = self._gpu.clock

    def query(self) -> bool:
        return bool(self.at <= self._gpu.passed)

    def elapsed_time(self, later: "TimedEvent") -> float:
        return 1000 * (later.at - self.at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU. clock: seconds, of what is queued now. passed: seconds, of what is computed. stream: the current one."""
    found = SimpleNamespace(clock=0.0, passed=0.0, stream="main")
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: TimedEvent(found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: found.stream)
    return found


def waiting(gpu: SimpleNamespace, seconds: float) -> Any:
    def wait() -> float:
        gpu.clock += seconds
        return seconds

    return wait


def test_waits_of_the_stream_add_up_once_the_gpu_has_ended_them(gpu: SimpleNamespace) -> None:
    stalls = StreamStalls(torch.device("cuda"))
    assert [stalls.timed(waiting(gpu, seconds)) for seconds in (1.0, 2.0)] == [1.0, 2.0]
    gpu.clock += 4.0
    assert stalls.seconds() == 0.0
    gpu.passed = 1.5
    assert stalls.seconds() == 1.0
    gpu.passed = gpu.clock
    assert [stalls.seconds(), stalls.seconds()] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("stream", "own", "seconds"), [("copies", False, 0.0), ("copies", True, 1.0), ("main", False, 1.0)]
)
def test_a_wait_counts_on_the_stream_or_in_the_thread_that_fills_it(
    stream: str, own: bool, seconds: float, gpu: SimpleNamespace
) -> None:
    """A thread that waits launches nothing, whatever stream is current. Autograd has a thread of its own."""
    stalls = StreamStalls(torch.device("cuda"))
    gpu.stream = stream
    if own:
        stalls.timed(waiting(gpu, 1.0))
    else:
        other = threading.Thread(target=stalls.timed, args=[waiting(gpu, 1.0)])
        other.start()
        other.join()
    gpu.passed = gpu.clock
    assert stalls.seconds() == seconds


def test_a_cpu_waits_without_being_measured() -> None:
    stalls = StreamStalls(torch.device("cpu"))
    assert (stalls.timed(lambda: 3), stalls.seconds()) == (3, 0.0)
