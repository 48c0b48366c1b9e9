"""The ranks that are called slow, and the ranks that they are compared with."""

from llmtrain.cluster.layout import Axis, Layout
from llmtrain.telemetry.stragglers import SAMPLES, Stragglers


def test_a_rank_is_held_against_those_of_its_stage() -> None:
    """Two stages of two ranks each; the first stage has three times the work of the second."""
    seen = Stragglers(Layout({Axis.PIPELINE: 2, Axis.DATA: 2}))
    samples = [seen.take([3.0, 3.0, 1.0, 1.5]) for _ in range(SAMPLES + 1)]
    assert [found for _, found in samples] == [None] * (SAMPLES - 1) + [(3, 1.5), None]
    assert samples[0][0] == {"median": 2.25, "slowest": 1.5, "rank": 3}


def test_a_rank_whose_work_nobody_else_has_is_not_judged() -> None:
    """A stage may have more work than others, by choice or because layers do not divide evenly."""
    seen = Stragglers(Layout({Axis.PIPELINE: 3}))
    samples = [seen.take([1.0, 5.0, 1.0]) for _ in range(2 * SAMPLES)]
    assert [found for _, found in samples] == [None] * 2 * SAMPLES
    assert samples[0][0] == {"median": 1.0, "slowest": 5.0, "rank": 1}
