"""The emulated accelerator steps every bucket in the order of the program, with states in memory and in files."""

import pytest
import torch
from llmtrain.plan.cost.offload_simulation import Computation, Order, Rates
from llmtrain.plan.program.offload_moves import Moves, order_problems

from tools.bench.emulated import EmulatedRun

STEPS, UNITS, PER_UNIT = 3, 3, 4
COMPUTATION = Computation([1e-3] * UNITS, [2e-3] * UNITS, microbatches=2)


def moves(in_files: bool, on_device: bool) -> list[Moves]:
    units = [unit for unit in range(UNITS) for _ in range(PER_UNIT)]
    return [
        Moves(
            unit=unit,
            spare=place % 2 == 0,
            elements=100,
            on_device=on_device,
            there=400,
            back=200,
            commit=200,
            files=(1200,) if in_files else (),
        )
        for place, unit in enumerate(units)
    ]


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_every_bucket_is_stepped_in_order(in_files: bool, on_device: bool) -> None:
    given = moves(in_files, on_device)
    rates = Rates(down=1e6, up=1e6, step=1e6, files=(1e7,) if in_files else ())
    run = EmulatedRun(given, COMPUTATION, rates, Order(1, fetched=2) if in_files else Order(2))
    run.run(STEPS)
    assert order_problems(given, run.happened) == []
    assert len(run.seconds) == STEPS
    assert min(run.seconds) >= COMPUTATION.seconds * (1 - 1e-6)
    # Each bucket has a gradient of its own sign and size, and Adam's first steps move all by the learning rate.
    assert torch.all(run.masters < 0)


def test_a_slow_volume_holds_up_the_steps() -> None:
    """The volume alone takes 144 ms of a step, and the computation 18 ms."""
    given = moves(in_files=True, on_device=False)
    rates = Rates(files=(1e5,))
    run = EmulatedRun(given, COMPUTATION, rates, Order(1, fetched=2))
    run.run(STEPS)
    assert min(run.seconds[1:]) >= sum(one.files[0] for one in given) / 1e5 * (1 - 1e-6)
