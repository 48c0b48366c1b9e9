"""Gradients and weights that pass through pinned slots, with streams that copy as late as they may: no GPU is needed.

A stream here is a list of copies; they run when something waits for them, and not before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llmtrain.offload.staging import Pinned
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SIZES = (1000, 1000, 1000, 500)


class LateStream:
    """Copies that wait. None of them runs before `run` is called for it."""

    def __init__(self, device: object = None) -> None:
        self.copies: list[Callable[[], object]] = []
        self.done = 0

    def run(self, until: int | None = None) -> None:
        """Run the copies before the given one, or all."""
        while self.done < (len(self.copies) if until is None else until):
            self.done += 1
            self.copies[self.done - 1]()

    def wait_stream(self, other: "LateStream") -> None:
        """Run what another stream has."""
        other.run()


class LateCopies(TorchDispatchMode):
    """Puts the copies of the current stream off."""

    def __init__(self) -> None:
        super().__init__()
        self.main = self.current = LateStream()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.copy_.default and self.current is not self.main:
            self.current.copies.append(lambda: torch.Tensor.copy_(args[0], args[1]))
            return args[0]
        return op(*args, **(kwargs or {}))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    mode, empty = LateCopies(), torch.empty

    class Event:
        stream, place = mode.main, 0

        def record(self) -> None:
            self.stream, self.place = mode.current, len(mode.current.copies)

        def synchronize(self) -> None:
            self.stream.run(self.place)

    @contextmanager
    def using(stream: LateStream) -> Iterator[None]:
        before, mode.current = mode.current, stream
        yield
        mode.current = before

    fakes = {"Stream": LateStream, "Event": Event, "current_stream": lambda: mode.main, "stream": using}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **given: empty(*sizes, **given))
    return mode


def units(count: int) -> list[tuple[Tensor, Tensor, list[slice]]]:
    """Gradients, weights and buckets of some units."""
    ends = [sum(SIZES[: place + 1]) for place in range(len(SIZES))]
    buckets = [slice(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    drawn = torch.Generator().manual_seed(0)
    return [(torch.randn(ends[-1], generator=drawn), torch.zeros(ends[-1]).bfloat16(), buckets) for _ in range(count)]


def step_all(staging: Pinned, count: int) -> list[bool]:
    """Let each bucket's weight become twice its gradient; return whether that arrived for each unit."""
    arrived = []
    for gradient, weight, buckets in units(count):
        staging.begin(gradient, weight, buckets)
        for number in range(len(buckets)):
            came, goes = staging.take(number)
            assert goes is not None
            torch.mul(came, 2, out=came)
            goes.copy_(came)
            staging.put(number)
        staging.end()
        arrived.append(torch.equal(weight, (gradient * 2).bfloat16()))
    return arrived


def test_copies_that_come_late_arrive(late: LateCopies) -> None:
    with late:
        assert step_all(Pinned(torch.device("cpu"), max(SIZES), torch.bfloat16), 3) == [True] * 3


class ReadsEarly(Pinned):
    """Does not wait for the gradient."""

    def take(self, number: int) -> tuple[Tensor, Tensor | None]:
        self._came = [SimpleNamespace(synchronize=lambda: None, record=event.record) for event in self._came]  # type: ignore[misc]
        return super().take(number)


class WritesEarly(Pinned):
    """Does not wait until the weight of two buckets ago has left its slot."""

    def take(self, number: int) -> tuple[Tensor, Tensor | None]:
        self._went = [SimpleNamespace(synchronize=lambda: None, record=event.record) for event in self._went]  # type: ignore[misc]
        return super().take(number)


class EndsEarly(Pinned):
    """Does not let the next computation wait for the weights."""

    def end(self) -> None:
        pass


@pytest.mark.parametrize("broken", [ReadsEarly, WritesEarly, EndsEarly])
def test_a_missing_wait_is_found(broken: type[Pinned], late: LateCopies) -> None:
    with late:
        assert not all(step_all(broken(torch.device("cpu"), max(SIZES), torch.bfloat16), 1))
