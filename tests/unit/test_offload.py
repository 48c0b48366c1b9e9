"""Offloaded optimizer states: the same bits wherever they rest."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, cast

import pytest
import torch
from llmtrain.cluster.levels import Degrees
from llmtrain.errors import RunFailedError
from llmtrain.model.config import GPTConfig
from llmtrain.model.gpt import GPT
from llmtrain.model.tensors import model_units
from llmtrain.offload.optimizer_states import OffloadedStates, open_states
from llmtrain.offload.states import FileStates
from llmtrain.offload.stepper import JobKind, Stepper, StepTicket
from llmtrain.plan.offload import Bucket, Offload, rounded
from llmtrain.plan.placement import Placement
from llmtrain.plan.program.offload_moves import MoveEvent, Moves, order_problems
from llmtrain.sharding.hops import Hops
from llmtrain.sharding.optimizer_shard import STATES
from llmtrain.sharding.unit import ShardedUnit
from llmtrain_kernels.adamw.step import AdamWStep
from llmtrain_kernels.direct_io.queue import DirectQueue
from torch import Tensor

CONFIG = GPTConfig(
    family="gpt2", layers=2, hidden=48, heads=2, kv_heads=2, ffn=100, positions=32, vocab=257, tie_embeddings=True,
    norm_eps=1e-5, rope_theta=1e4, rotary_fraction=1.0, activation="gelu_tanh", dropout=0.0,
)  # fmt: skip
CPU = torch.device("cpu")


def units_of(dtype: torch.dtype, gradients: Literal["fp32", "compute"] = "fp32") -> list[ShardedUnit]:
    model = GPT(CONFIG, CPU)
    masters: Literal["weights", "separate"] = "weights" if dtype == torch.float32 else "separate"
    alone = Hops(Placement(axes=(), degrees=Degrees(), levels=(), masters=masters, gradients=gradients, backend="cpu"))
    return [ShardedUnit(spec, model.unit(spec.name), alone, dtype, 0, CPU) for spec in model_units(CONFIG)]


def buckets_of(units: list[ShardedUnit], offload: Offload) -> list[Bucket]:
    resident = {unit: offload.resident(unit.spec.name, unit.spec.numel) for unit in units}
    cut = [(unit, ends) for unit in units for ends in offload.buckets(resident[unit], unit.spec.numel)]
    return [
        Bucket(unit.spec.name, *ends, 2 if unit.masters_are_weights else 3, place < offload.spare * len(cut))
        for place, (unit, ends) in enumerate(cut)
    ]


@contextmanager
def offloaded(
    dtype: torch.dtype, offload: Offload, gradients: Literal["fp32", "compute"] = "fp32"
) -> Iterator[tuple[list[ShardedUnit], OffloadedStates]]:
    units = units_of(dtype, gradients)
    buckets = buckets_of(units, offload)
    found = open_states(offload, buckets, CPU, dtype, units[0].gradient.dtype)
    assert found is not None
    for unit in units:
        found.take(unit, {})
    yield units, found
    found.close()


DIVISOR = 1.7


def numbers_of(number: int, divisor: float = DIVISOR) -> AdamWStep:
    return AdamWStep(
        step=number, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, gradient_divisor=torch.tensor(divisor)
    )


def draw(units: list[ShardedUnit], number: int, events: list[MoveEvent] | None = None) -> None:
    """Draw the gradients of a step, from the last unit to the first, and let each unit be stepped ahead."""
    for place, unit in reversed(list(enumerate(units))):
        unit.gradient.normal_(generator=torch.Generator().manual_seed(100 * number + place))
        if events is not None:
            events.append(MoveEvent("gradient", place))
        unit.step_ahead()


def step(
    units: list[ShardedUnit],
    number: int,
    stepper: Stepper | None = None,
    ahead: float | None = None,
    events: list[MoveEvent] | None = None,
) -> None:
    """Step units with drawn gradients; the first steps wait for steps ahead. ahead: the divisor of a step ahead of some
    of them; None for no step ahead. events: receives what happens."""
    events = [] if events is None else events
    if stepper is not None:
        stepper.begin(None if ahead is None else numbers_of(number, ahead))
    draw(units, number, events)
    if stepper is not None and number < 5:
        stepper.wait_until(lambda: not stepper._queue.ahead and stepper._queue.steps_ahead_done)
    if stepper is not None:
        stepper.decide(numbers_of(number))
        events.append(MoveEvent("decide", applies=ahead == DIVISOR))
    tickets = [unit.step(numbers_of(number)) for unit in units]
    for ticket in tickets:
        if ticket is not None:
            ticket.wait()


def states(units: list[ShardedUnit]) -> list[Tensor]:
    held = [unit.optimizer.read(name, *unit.optimizer.bounds).clone() for unit in units for name in STATES]
    return [*held, *(unit.weight for unit in units)]


OFFLOADS = {
    "host": Offload(tier="host", share=1.0),
    "host, small buckets, a third": Offload(tier="host", share=0.3, bucket=2048),
    "nvme": Offload(tier="nvme", share=1.0),
    "nvme, one bucket": Offload(tier="nvme", share=0.05),
    "nvme, small buckets": Offload(tier="nvme", share=1.0, bucket=1024),
    "nvme, small buckets, a third": Offload(tier="nvme", share=0.3, bucket=3072),
    "host, on the device": Offload(tier="host", share=1.0, bucket=2048, on_device=True, overlap=1),
    "host, ahead": Offload(tier="host", share=1.0, bucket=2048, spare=1.0),
    "host, a part ahead": Offload(tier="host", share=0.7, bucket=2048, spare=0.4),
    "host, on the device, ahead": Offload(tier="host", share=1.0, bucket=3072, spare=0.7, on_device=True),
    "nvme, on the device": Offload(tier="nvme", share=1.0, bucket=2048, on_device=True),
    "nvme, ahead": Offload(tier="nvme", share=1.0, bucket=2048, spare=1.0),
    "nvme, on the device, a part ahead": Offload(tier="nvme", share=0.5, bucket=2048, spare=0.5, on_device=True),
}
# The divisors of steps ahead: none, that of the step, or another one.
AHEAD = (None, 1.7, 1.0, 1.7, 1.7, 1.0, 1.7)


@pytest.mark.parametrize(
    ("dtype", "gradients"),
    [(torch.float32, "fp32"), (torch.bfloat16, "fp32"), (torch.bfloat16, "compute")],
    ids=str,
)
@pytest.mark.parametrize("volumes", [1, 3])
@pytest.mark.parametrize("name", OFFLOADS)
def test_steps_have_the_same_bits(
    name: str, volumes: int, dtype: torch.dtype, gradients: Literal["fp32", "compute"], tmp_path: Path
) -> None:
    paths = [tmp_path / str(volume) for volume in range(volumes)]
    for path in paths:
        path.mkdir()
    given = OFFLOADS[name]
    offload = replace(given, paths=tuple(map(str, paths)) if given.tier == "nvme" else ())
    beside = units_of(dtype, gradients)
    with offloaded(dtype, offload, gradients) as (units, outside):
        assert all(map(torch.equal, states(units), states(beside)))
        events = list[MoveEvent]()
        outside.stepper.observe = lambda do, bucket: events.append(MoveEvent(do.value, bucket))
        for number, ahead in enumerate(AHEAD, 1):
            step(units, number, outside.stepper, ahead, events)
            step(beside, number)
            if number in (2, 5):
                # A checkpoint reads between two steps, and a rewind writes.
                assert all(map(torch.equal, states(units), states(beside)))
                for unit, other in zip(units, beside, strict=True):
                    write_odd_ranges(unit, other)
        assert all(map(torch.equal, states(units), states(beside)))
        moves = moves_of(units, offload)
        assert order_problems(moves, events) == []
        assert ("commit" in {event.kind for event in events}) == bool(offload.spare)
        # A CPU copies nothing to a device.
        assert (outside.usage().to_host, outside.usage().to_device) == (0, 0)
        assert all(
            unit.nbytes < other.nbytes for unit, other in zip(units, beside, strict=True) if unit.spec.numel > 30000
        )
        assert units[0].optimizer.read_late
        assert sorted(tmp_path.rglob("*")) == paths


@pytest.mark.parametrize("name", ["host, ahead", "nvme, ahead"])
def test_a_step_ahead_has_the_numbers_of_its_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it counts, and runs when the next step has begun."""
    beside, offload = units_of(torch.bfloat16), replace(OFFLOADS[name], paths=(str(tmp_path),))
    with offloaded(torch.bfloat16, offload) as (units, outside):
        stepper, fetch = outside.stepper, outside.states.fetch
        entered, begun = threading.Event(), threading.Event()

        def fetch_late(bucket: int) -> None:
            begun.wait(60)
            fetch(bucket)

        monkeypatch.setattr(outside.states, "fetch", fetch_late)
        stepper.observe = lambda do, bucket: entered.set()
        stepper.begin(numbers_of(1))
        draw(units, 1)
        entered.wait(60)
        stepper.decide(numbers_of(1))
        tickets = [unit.step(numbers_of(1)) for unit in units]
        stepper.begin(numbers_of(2, 1.0))
        begun.set()
        for ticket in tickets:
            assert ticket is not None
            ticket.wait()
        assert stepper.done[JobKind.COMMIT] > 0
        step(beside, 1)
        assert all(map(torch.equal, states(units), states(beside)))


def test_each_bucket_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """To what watches whether the rank makes progress."""
    told = list[None]()
    with offloaded(torch.bfloat16, OFFLOADS["host, a part ahead"]) as (units, outside):
        monkeypatch.setattr(outside.stepper, "moving", lambda: told.append(None))
        step(units, 1, outside.stepper, DIVISOR)
        assert len(told) == sum(outside.stepper.done.values()) > len(units)


def test_a_step_ahead_leaves_its_gradient_as_it_is() -> None:
    """torch's fused kernel divides it in place. The norm is taken of it, and a discarded step is done again."""
    offload, beside = replace(OFFLOADS["host, ahead"], backend="torch"), units_of(torch.float32)
    draw(beside, 1)
    with offloaded(torch.float32, offload) as (units, outside):
        outside.stepper.begin(numbers_of(1))
        draw(units, 1)
        # What no thread has taken up is not stepped ahead any more once the norm is known.
        outside.stepper.wait_until(lambda: outside.stepper.done[JobKind.AHEAD] > 0)
        outside.stepper.decide(None)
        assert all(torch.equal(unit.gradient, other.gradient) for unit, other in zip(units, beside, strict=True))


def moves_of(units: list[ShardedUnit], offload: Offload) -> list[Moves]:
    places = {unit.spec.name: place for place, unit in enumerate(units)}
    return [Moves(unit=places[one.unit], spare=one.spare, elements=one.numel) for one in buckets_of(units, offload)]


@pytest.mark.parametrize("bucket", [1024, 2**19])
def test_a_step_reads_and_writes_everything_once(bucket: int, tmp_path: Path) -> None:
    offload = Offload(tier="nvme", share=1.0, bucket=bucket, paths=(str(tmp_path),))
    with offloaded(torch.bfloat16, offload) as (units, outside):
        tier = outside.states
        whole = sum(bucket.nbytes for bucket in buckets_of(units, offload))
        before = tier.usage()
        for number in (1, 2, 3):
            step(units, number, outside.stepper)
            # The last writes are not waited for before the next step, or the next read.
            assert [*tier.usage().since(before)["read_bytes"].values()] == [number * whole]
        units[0].optimizer.read("m", 0, 1)
        moved = tier.usage().since(before)
        assert [*moved["written_bytes"].values()] == [3 * whole]
        assert moved["wait_s"] > 0
        # One volume: all waits are for it. A CPU copies nothing to a device.
        assert moved["waits_s"] == {str(tmp_path): pytest.approx(moved["wait_s"], rel=0.2, abs=2e-3)}
        assert "to_host_bytes" not in moved


def test_waits_of_the_computation_for_steps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the main thread: another thread waits beside it."""
    clock = [0.0]
    monkeypatch.setattr("llmtrain.offload.stepper.time.perf_counter", lambda: clock[0])
    with offloaded(torch.bfloat16, OFFLOADS["host"]) as (units, outside):
        stepper, waiting = outside.stepper, threading.Event()

        def fetch_slowly(bucket: int) -> None:
            waiting.wait(60)
            clock[0] += 0.5

        def step_and_wait() -> None:
            waiting.clear()
            ticket = units[-1].step(numbers_of(1))
            stepper.wait_until(lambda: waiting.set() or not cast(StepTicket, ticket).left)

        monkeypatch.setattr(outside.states, "fetch", fetch_slowly)
        stepper.decide(numbers_of(1))
        step_and_wait()
        assert outside.usage().compute_waited == 0.5
        other = threading.Thread(target=step_and_wait)
        other.start()
        other.join()
        assert clock[0] == 1.0
        assert outside.usage().compute_waited == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["host, small buckets, a third", "nvme, small buckets"])
def test_states_of_a_unit_are_read_while_another_one_is_stepped(
    dtype: torch.dtype, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed updates of a unit are made of its masters, and begin before all units are stepped."""
    with offloaded(dtype, replace(OFFLOADS[name], paths=(str(tmp_path),))) as (units, outside):
        stepper, goes_on = outside.stepper, threading.Event()
        draw(units, 1)
        stepper.decide(numbers_of(1))
        cast(StepTicket, units[0].step(numbers_of(1))).wait()
        expected = [units[0].optimizer.read(state, *units[0].optimizer.bounds).clone() for state in STATES]
        fetch = outside.states.fetch
        monkeypatch.setattr(outside.states, "fetch", lambda bucket: (goes_on.wait(10), fetch(bucket)))
        ticket = cast(StepTicket, units[-1].step(numbers_of(1)))
        found = [units[0].optimizer.read(state, *units[0].optimizer.bounds) for state in STATES]
        assert ticket.left > 0
        goes_on.set()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        # Those of the unit itself are waited for.
        units[-1].optimizer.read("m", *units[-1].optimizer.bounds)
        assert ticket.left == 0


def write_odd_ranges(unit: ShardedUnit, other: ShardedUnit) -> None:
    """Set ranges that begin and end within buckets, granules and pages."""
    start, end = unit.optimizer.bounds
    for name in STATES:
        for first, last in pairwise((start, start + 1, start + (end - start) // 3, end - 7, end)):
            values = torch.rand(last - first, generator=torch.Generator().manual_seed(first))
            unit.optimizer.write(name, first, values)
            other.optimizer.write(name, first, values)
    unit.publish()
    other.publish()


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_each_read_and_write_of_a_bucket_is_told(tier: Literal["host", "nvme"], tmp_path: Path) -> None:
    """The watchdog would take the reads and writes of all of them, one after another, for a hang."""
    units = units_of(torch.bfloat16)
    offload = Offload(tier=tier, share=1.0, bucket=2048, paths=(str(tmp_path),), bandwidths=(1.0,))
    buckets, told = buckets_of(units, offload), list[int]()
    found = open_states(offload, buckets, CPU, torch.bfloat16, torch.float32)
    assert found is not None
    found.stepper.moving = lambda: told.append(1)
    for unit in units:
        found.take(unit, {})
    assert len(told) == len(buckets) > 2 * len(units)
    for unit in units:
        unit.optimizer.read("master", *unit.optimizer.bounds)
    assert len(told) == 2 * len(buckets)
    # Within one bucket.
    units[0].optimizer.read("m", 0, 1)
    assert len(told) == 2 * len(buckets) + 1
    found.close()


def test_a_write_that_fails_ends_the_run_though_a_checkpoint_has_waited_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that cannot be saved is only told. The next step must not take what the file has instead."""
    offload = Offload(tier="nvme", share=1.0, bucket=4096, paths=(str(tmp_path),))
    finish, failures = DirectQueue.finish, [OSError(errno.EIO, os.strerror(errno.EIO))]

    def failing_once(queue: DirectQueue, transfer: int) -> None:
        finish(queue, transfer)
        if failures:
            raise failures.pop()

    with offloaded(torch.float32, offload) as (units, outside):
        step(units, 1, outside.stepper)
        monkeypatch.setattr(DirectQueue, "finish", failing_once)
        for use in (lambda: states(units), lambda: step(units, 2, outside.stepper)):
            with pytest.raises(RunFailedError, match="which failed: Input/output error; the same command resumes"):
                use()


def test_a_volume_that_fails_under_way(tmp_path: Path) -> None:
    """Whatever a step or a checkpoint waits for: one sentence."""
    offload = Offload(tier="nvme", share=1.0, bucket=4096, paths=(str(tmp_path),))
    said = "which failed: Bad file descriptor; the same command resumes from the newest checkpoint, if there is one"
    with offloaded(torch.float32, offload) as (units, outside):
        step(units, 1, outside.stepper)
        assert isinstance(outside.states, FileStates)
        outside.states._file.close()
        for use in (
            lambda: step(units, 2, outside.stepper),
            lambda: states(units),
            lambda: write_odd_ranges(units[0], units[0]),
        ):
            with pytest.raises(RunFailedError, match=said):
                use()


def test_a_bucket_in_a_file_is_whole_pages() -> None:
    assert Bucket("a", 0, 1000, 3).nbytes == 3 * 4096
    assert rounded(1025) == 2048
