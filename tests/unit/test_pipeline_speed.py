"""Speeds of a pipeline's stages, from the measured speeds of their ranks."""

import pytest
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.parallel.pipeline.speed import ComputeRate, stage_speeds_of

PIPELINE = Layout({Axis.PIPELINE: 4, Axis.DATA: 1, Axis.TENSOR: 1})
GRID = Layout({Axis.DATA: 2, Axis.PIPELINE: 2, Axis.TENSOR: 1})


def steady(rates: tuple[float, ...]) -> list[ComputeRate]:
    return [ComputeRate(rate, rate) for rate in rates]


@pytest.mark.parametrize("rates", [(7.0, 7.0, 7.0, 7.0), (100.0, 91.0, 95.0, 99.0)])
def test_ranks_that_are_alike_have_no_speeds(rates: tuple[float, ...]) -> None:
    assert stage_speeds_of(steady(rates), PIPELINE) is None


@pytest.mark.parametrize(
    ("rates", "speeds"),
    [
        ((200.0, 100.0, 195.0, 185.0), (1.0, 0.5, 1.0, 1.0)),
        # In a run, the ranks of small steps are not all equally fast.
        ((100.0, 94.0, 88.0, 82.0), (1.0, 1.0, 0.88, 0.88)),
    ],
)
def test_speeds_are_shares_of_the_fastest_and_small_differences_do_not_count(
    rates: tuple[float, ...], speeds: tuple[float, ...]
) -> None:
    assert stage_speeds_of(steady(rates), PIPELINE) == speeds


def test_a_stage_is_as_fast_as_its_slowest_rank() -> None:
    """Ranks 0 and 2 are the first stage, 1 and 3 the second."""
    assert stage_speeds_of(steady((100.0, 100.0, 100.0, 40.0)), GRID) == (1.0, 0.4)


def test_a_rank_beside_which_something_else_runs_is_no_measure_of_the_others() -> None:
    rates = [ComputeRate(100.0, 55.0), ComputeRate(62.0, 50.0), ComputeRate(70.0, 65.0), ComputeRate(90.0, 50.0)]
    assert stage_speeds_of(rates, PIPELINE) is None
    assert stage_speeds_of([*rates[:3], ComputeRate(40.0, 30.0)], PIPELINE) == (1.0, 1.0, 1.0, 0.4)
