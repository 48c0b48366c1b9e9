"""Gradients and weights that pass through pinned slots, with streams that copy as late as they may."""

from types import SimpleNamespace

import pytest
import torch
from late_streams import LateCopies, late_copies
from llmtrain.offload.staging import Pinned
from torch import Tensor

SIZES = (1000, 1000, 1000, 500)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    return late_copies(monkeypatch)


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
