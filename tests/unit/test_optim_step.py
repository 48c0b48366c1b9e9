"""Schedules, clipping and loss scale."""

from itertools import pairwise
from math import inf, isfinite, nan

import pytest
import torch
from llmtrain.optim.clipping import step_divisor
from llmtrain.optim.config import AdamW, LossScaling
from llmtrain.optim.loss_scale import LossScale
from llmtrain.optim.lr_schedule import learning_rate
from torch import Tensor


def rates(schedule: str, steps: int = 100, **keys: float) -> list[float]:
    config = AdamW(schedule=schedule, lr=1.0, warmup=10, min_lr=0.1, **keys)  # type: ignore[arg-type]
    return [learning_rate(config, step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_warm_up_is_linear_and_reaches_the_peak(schedule: str) -> None:
    values = rates(schedule)
    assert values[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(values) == 1.0


def test_cosine_and_linear_end_on_the_floor() -> None:
    for schedule in ("cosine", "linear"):
        values = rates(schedule)
        assert values[-1] == pytest.approx(0.1)
        assert all(a >= b for a, b in pairwise(values[10:]))
    # Half way, both schedules are at the middle between peak and floor.
    steps = 10 + 91
    assert rates("cosine", steps)[55] == pytest.approx(rates("linear", steps)[55])


def test_wsd_is_flat_then_falls() -> None:
    values = rates("wsd", decay=0.2)
    assert set(values[10:81]) == {1.0}
    assert values[-1] == pytest.approx(0.1)
    assert values[90] == pytest.approx(1.0 - 0.9 * 10 / 19)


def test_constant_stays() -> None:
    assert set(rates("constant")[10:]) == {1.0}


@pytest.mark.parametrize(
    ("norm", "scale", "clip", "divisor"),
    [(0.5, 1.0, 1.0, 1.0), (4.0, 1.0, 1.0, 4.0), (4.0, 1.0, 0.0, 1.0), (4.0 * 8, 8.0, 1.0, 32.0), (4.0, 8.0, 1.0, 8.0)],
)
def test_divisor_undoes_scale_and_clips(norm: float, scale: float, clip: float, divisor: float) -> None:
    found = step_divisor(one(1.0), one(norm), scale, clip)
    assert (found.dtype, float(found)) == (torch.float32, divisor)


@pytest.mark.parametrize("loss", [2.0, inf, nan])
@pytest.mark.parametrize("norm", [3.0, inf, nan])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_there_is_no_divisor_without_finite_numbers(loss: float, norm: float, clip: float) -> None:
    found = step_divisor(one(loss), one(norm), 8.0, clip)
    assert isfinite(found) == (isfinite(loss) and isfinite(norm))


def one(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_loss_scale_halves_and_doubles() -> None:
    scale = LossScale.of(LossScaling(loss_scale=8.0, loss_scale_window=2), "fp16")
    scale.update(finite=False, dynamic=True)
    assert scale.value == 4.0
    scale.update(finite=True, dynamic=True)
    scale.update(finite=True, dynamic=True)
    assert scale.value == 8.0
    # A resumed run may have had a longer window before.
    scale.good_steps = 600
    scale.update(finite=True, dynamic=True)
    assert scale.value == 16.0
    assert LossScale.of(LossScaling(loss_scale=8.0, loss_scale_window=2), "bf16").value == 1.0
