"""Ranks that start together share a part of the store, whatever earlier ranks left in it."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from llmtrain.comm.attempt import of_this_start

SOON = timedelta(seconds=10)


def start(store: dist.Store, ranks: Sequence[int], world: int) -> list[dist.Store]:
    """Start ranks side by side; return their stores."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: of_this_start(store, rank, world, SOON), ranks))


def test_ranks_that_start_again_see_nothing_of_earlier_ones() -> None:
    store = dist.HashStore()
    for order in ([0, 1, 2], [2, 1, 0]):
        first, *others = start(store, order, 3)
        assert not first.check(["reason"])
        first.set("reason", "over")
        assert [other.get("reason") for other in others] == [b"over", b"over"]


def test_what_a_rank_left_that_met_nobody_is_no_rank() -> None:
    store = dist.HashStore()
    with pytest.raises(dist.DistStoreError):
        of_this_start(store, 1, 3, timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError, match="2 ranks were to come"):
        of_this_start(store, 0, 3, timedelta(seconds=0.3))
    assert len(start(store, [1, 0, 2], 3)) == 3


def test_a_rank_of_another_run_is_not_answered() -> None:
    store = dist.HashStore()
    start(store, [0, 1], 2)
    with pytest.raises(dist.DistStoreError):
        of_this_start(store, 1, 2, timedelta(seconds=0.3))
