"""Units that are stepped range by range, as their gradients rest outside of the device."""

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
import torch
from llmtrain.comm.waits import Ticket
from llmtrain.sharding.optimizer_shard import STATES, StepRange
from llmtrain.sharding.unit import ShardedUnit

from tests.unit.test_offload import OFFLOADS, draw, numbers_of, offloaded, states, step, units_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["host, small buckets, a third", "nvme, small buckets", "host, on the device"])
def test_ranges_are_handed_out_while_those_before_them_are_stepped(
    dtype: torch.dtype, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that rest elsewhere come in ranges, which are cut elsewhere than the buckets of states."""
    offload = replace(OFFLOADS[name], paths=(str(tmp_path),), gradients="host")
    units, begin = units_of(dtype), threading.Event()
    with offloaded(dtype, offload) as (others, outside):
        take = outside.states.take
        monkeypatch.setattr(outside.states, "take", lambda *given: (begin.wait(10), take(*given))[1])
        for number in (1, 2):
            step(units, number)
            draw(others, number)
            outside.stepper.decide(numbers_of(number))
            begin.clear()
            tickets = [cast(Ticket, other.step_by_ranges(numbers_of(number), in_ranges(other))) for other in others]
            assert outside.stepper._queue.left > len(others)
            begin.set()
            # A read waits for all ranges of its unit.
            read = [others[0].optimizer.read(state, *others[0].optimizer.bounds) for state in STATES]
            for one, other in zip(read, states(units), strict=False):
                assert torch.equal(one, other)
            for ticket in tickets:
                ticket.wait()
        for one, other in zip(states(others), states(units), strict=True):
            assert torch.equal(one, other)


def in_ranges(unit: ShardedUnit) -> Callable[[StepRange], None]:
    """Return what steps a unit in ranges of odd sizes."""

    def step_all(step_range: StepRange) -> None:
        start, end = unit.ranges.optimizer
        for first, last in pairwise([*range(start, end, 1700), end]):
            step_range((first, last), unit.owned_gradient[first - start : last - start])

    return step_all
