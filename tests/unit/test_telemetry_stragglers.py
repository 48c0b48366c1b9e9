"""The ranks that are called slow, and the ranks that they are compared with."""

import random
from statistics import median

from llmtrain.cluster.layout import Axis, Layout
from llmtrain.telemetry.stragglers import SAMPLES, Stragglers


def test_a_rank_is_held_against_those_of_its_stage() -> None:
    """Two stages of two ranks each; the first stage has three times the work of the second."""
    seen = Stragglers(Layout({Axis.PIPELINE: 2, Axis.DATA: 2}))
    samples = [seen.take([3.0, 3.0, 1.0, 1.5]) for _ in range(SAMPLES + 1)]
    assert [found for _, found in samples] == [{}] * (SAMPLES - 1) + [{3: 1.5}, {}]
    assert samples[0][0] == {"median": 2.25, "slowest": 1.5, "rank": 3}


def test_a_rank_whose_work_nobody_else_has_is_not_judged() -> None:
    """A stage may have more work than others, by choice or because layers do not divide evenly."""
    seen = Stragglers(Layout({Axis.PIPELINE: 3}))
    samples = [seen.take([1.0, 5.0, 1.0]) for _ in range(2 * SAMPLES)]
    assert [found for _, found in samples] == [{}] * 2 * SAMPLES
    assert samples[0][0] == {"median": 1.0, "slowest": 5.0, "rank": 1}


def test_all_ranks_of_a_slow_machine_are_found_at_once_and_told_once() -> None:
    noise, seen = random.Random(1), Stragglers(Layout({Axis.DATA: 64}))
    samples = [
        seen.take([(1.5 if 8 <= rank < 16 else 1.0) * noise.gauss(1, 0.01) for rank in range(64)])[1]
        for _ in range(100)
    ]
    assert [set(found) for found in samples[:SAMPLES]] == [set()] * (SAMPLES - 1) + [set(range(8, 16))]
    assert not any(samples[SAMPLES:])


def test_a_ratio_is_to_the_median_of_the_other_ranks() -> None:
    noise = random.Random(2)
    for ranks in (2, 3, 4, 7, 8):
        seconds = [noise.choice((1.0, 1.0, 2.0, 5.0)) for _ in range(ranks)]
        ratios = Stragglers(Layout({Axis.DATA: ranks}))._ratios(seconds)
        assert ratios == [own / median(seconds[:rank] + seconds[rank + 1 :]) for rank, own in enumerate(seconds)]
