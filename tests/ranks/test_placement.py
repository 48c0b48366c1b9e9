"""A model with units over different groups of ranks trains as in one process."""

from functools import cache
from typing import Any

import pytest

from tests.ranks.forks import answers
from tests.ranks.placement_ranks import CASES, EXPERT


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda: answers("placement_ranks.py", 4, tmp_path_factory.mktemp("placement")))


@pytest.mark.parametrize("name", CASES)
def test_an_expert_and_a_product_of_axes(name: str, found: Any) -> None:
    """Dense units over all four ranks, and an expert block over the two ranks that share it: 20 steps with clipping, in
    fp32."""
    dense, expert = (1 / cut[0] for cut in CASES[name])
    for rank in found():
        assert rank[name]["weights"] < 1e-5
        assert rank[name]["norms"] < 1e-5
        for unit, held in rank[name]["held"].items():
            assert held == (expert if unit == EXPERT else dense)
