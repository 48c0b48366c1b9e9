"""Gradients, weights and states that pass through slots, with streams that copy as late as they may."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from llmtrain.comm.waits import Done, Event
from llmtrain.offload import copies as copies_module
from llmtrain.offload import staging as staging_module
from llmtrain.offload.copies import StreamCopies
from llmtrain.offload.staging import BucketStep, OnDevice, Pinned, Staging, StepAhead
from llmtrain.sharding.optimizer_shard import SeparateMasters, StepRule
from llmtrain_kernels.adamw.step import AdamWStep

from tests.late_streams import LateCopies, LateStream, late_copies

SIZES = (1000, 1000, 1000, 500)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    # Tensors of the host stand for those of the device.
    for module in (copies_module, staging_module):
        monkeypatch.setattr(module, "in_host_memory", lambda tensor: False)
    return late_copies(monkeypatch)


class Doubles:
    """A rule that adds the gradient to each state, twice; the weights become the masters."""

    masters = SeparateMasters()

    def __init__(self, late: LateCopies) -> None:
        self._late = late

    def step(self, states: Any, within: Any, gradient: Any, numbers: Any, weight: Any, into: Any, threads: int) -> None:
        def computed() -> None:
            for name, state in states.items():
                torch.Tensor.copy_((into or states)[name], state + 2 * gradient)
            torch.Tensor.copy_(weight, (into or states)["master"])

        if self._late.current is self._late.main:
            computed()
        else:
            self._late.current.copies.append(computed)


def on_device(copies: StreamCopies) -> OnDevice:
    return OnDevice(copies, torch.zeros(3, max(SIZES)), torch.zeros(max(SIZES)), torch.zeros(max(SIZES)).bfloat16())


def on_device_waiting(copies: StreamCopies) -> OnDevice:
    nothing = torch.zeros(0).bfloat16()
    return OnDevice(copies, torch.zeros(3, max(SIZES)), torch.zeros(max(SIZES)), nothing, on_device=True)


def pinned_waiting(copies: StreamCopies) -> Pinned:
    return Pinned(copies, max(SIZES), torch.bfloat16, torch.float32, on_device=True)


def pinned(copies: StreamCopies) -> Pinned:
    return Pinned(copies, max(SIZES), torch.bfloat16, torch.float32)


def narrow(copies: StreamCopies) -> Pinned:
    return Pinned(copies, max(SIZES), torch.bfloat16, torch.bfloat16)


MAKERS: dict[str, Callable[[StreamCopies], Staging]] = {
    "pinned": pinned,
    "pinned, narrow": narrow,
    "pinned, weights wait on the device": pinned_waiting,
    "on device": on_device,
    "on device, weights wait there": on_device_waiting,
}


def sums_of(make: str) -> torch.dtype:
    return torch.bfloat16 if make == "pinned, narrow" else torch.float32


def stepped(
    make: Callable[[StreamCopies], Staging], copies: type[StreamCopies], late: LateCopies, ahead: bool,
    sums: torch.dtype = torch.float32,
) -> bool:  # fmt: skip
    """Step buckets one after the other; return whether all of their states and weights are right in the end."""
    staging, drawn = make(copies(torch.device("cuda"))), torch.Generator().manual_seed(0)
    numbers, right, done = AdamWStep(step=1, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1), [], []
    for number, size in enumerate(SIZES):
        values, old = torch.randn(size, generator=drawn).to(sums), torch.randn(3, size, generator=drawn)
        gradient, weight, expected = torch.zeros_like(values), torch.zeros(size).bfloat16(), old + 2 * values
        # The device computes the gradient late.
        computing, event = LateStream(), torch.cuda.Event()
        with torch.cuda.stream(computing):  # type: ignore[arg-type]
            gradient.copy_(values)
            event.record()
        work = BucketStep(
            bucket=number, part=slice(0, size), last=True, within=(0, size), rule=cast(StepRule, Doubles(late)),
            gradient=gradient, weight=weight, computed=event,
        )  # fmt: skip
        came: Event = Done()
        if ahead:
            stepped, new = StepAhead(work, torch.zeros(size).bfloat16()), torch.zeros_like(old)
            staging.step_ahead(stepped, old, new, True, numbers)
        else:
            new = old
            came = staging.step(work, old, numbers)
        right.append(torch.equal(new, expected))
        # The gradient may change now.
        gradient.fill_(7)
        if ahead:
            assert not weight.any()
            came = staging.publish(stepped)
        done.append((came, weight, expected[0].bfloat16()))
    for came, weight, expected in done:
        came.synchronize()
        right.append(torch.equal(weight, expected))
    return all(right)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("make", MAKERS)
def test_copies_that_come_late_arrive(make: str, ahead: bool, late: LateCopies) -> None:
    with late:
        assert stepped(MAKERS[make], StreamCopies, late, ahead, sums_of(make))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("make", MAKERS)
def test_what_is_copied_is_counted(make: str, ahead: bool, late: LateCopies) -> None:
    made: list[Staging] = []

    def kept(copies: StreamCopies) -> Staging:
        made.append(MAKERS[make](copies))
        return made[-1]

    with late:
        stepped(kept, StreamCopies, late, ahead, sums_of(make))
    elements, (link,) = sum(SIZES), [one.link for one in made]
    if make.startswith("pinned"):
        # Gradients in fp32 or bf16, and 16-bit weights.
        assert (link.to_host, link.to_device) == ((2 if make == "pinned, narrow" else 4) * elements, 2 * elements)
    else:
        # Three states; the weights of a step ahead wait in the host's memory, or on the device.
        more = 2 * elements if ahead and make == "on device" else 0
        assert (link.to_host, link.to_device) == (12 * elements + more, 12 * elements + more)


class Earlier(StreamCopies):
    """Does not wait until the gradient is computed."""

    def after(self, event: Event) -> Any:
        return super().after(Done())


class Impatient(StreamCopies):
    """Does not let the host wait for the copies."""

    def wait(self) -> None:
        pass


class Hasty(StreamCopies):
    """Waits for the gradient that comes, and not for the weight that goes."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1
        if self.waits % 2:
            super().wait()


class Unreported(StreamCopies):
    """Does not say when the weights are there."""

    def record(self) -> Event:
        return Done()

    def publish(self, to: torch.Tensor, values: torch.Tensor, after: Event) -> Event:
        super().publish(to, values, after)
        return Done()


@pytest.mark.parametrize(
    ("make", "broken", "ahead"),
    [
        *((make, broken, ahead) for make in MAKERS for broken in (Earlier, Impatient) for ahead in (False, True)),
        ("pinned", Unreported, False),
        ("pinned", Unreported, True),
        ("on device", Unreported, True),
        ("pinned, weights wait on the device", Hasty, True),
    ],
)
def test_a_missing_wait_is_found(make: str, broken: type[StreamCopies], ahead: bool, late: LateCopies) -> None:
    with late:
        assert not stepped(MAKERS[make], broken, late, ahead, sums_of(make))


@pytest.mark.parametrize("ahead", [False, True])
def test_weights_that_rest_on_the_host_are_written_there(
    ahead: bool, late: LateCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a step returns, and nothing is copied to the device."""
    for module in (copies_module, staging_module):
        monkeypatch.setattr(module, "in_host_memory", lambda tensor: tensor.dtype == torch.bfloat16)
    staging = pinned(Unreported(torch.device("cuda")))
    with late:
        assert stepped(lambda given: staging, Unreported, late, ahead)
    assert staging.link.to_device == 0
