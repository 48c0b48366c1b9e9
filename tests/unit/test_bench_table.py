"""The benchmarks' statements on their figures."""

from itertools import product

import pytest

from tools.bench.table import median_interval


def share_of_draws_that_hold_zero(count: int, left_out: int) -> float:
    """Count all ways in which `count` draws can lie around a median of 0, each equally likely."""
    ways = list(product((-1, 1), repeat=count))
    held = 0
    for signs in ways:
        ordered = sorted(sign * place for place, sign in enumerate(signs, start=1))
        held += ordered[left_out] < 0 < ordered[count - 1 - left_out]
    return held / len(ways)


@pytest.mark.parametrize("count", range(6, 13))
def test_a_median_lies_in_its_interval_95_times_in_100_and_in_none_narrower(count: int) -> None:
    least, most = median_interval(list(range(count)))
    assert least == count - 1 - most
    assert (
        share_of_draws_that_hold_zero(count, int(least)) >= 0.95 > share_of_draws_that_hold_zero(count, int(least) + 1)
    )


def test_with_too_few_values_the_interval_is_all_of_them() -> None:
    assert median_interval([3.0]) == (3.0, 3.0)
    assert median_interval([2.0, 1.0, 3.0]) == (1.0, 3.0)
