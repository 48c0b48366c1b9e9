"""Sums and gathers over ranks, which are threads here, each with a process group of its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from llmtrain.comm import small_collectives as rounds
from torch import Tensor

RANKS = 3


def on_ranks(work: Callable[[dist.ProcessGroup, int], Tensor]) -> list[Tensor]:
    """Return what each of three ranks makes of it."""
    store = dist.HashStore()

    def rank(number: int) -> Tensor:
        group = dist.ProcessGroup(store, number, RANKS)
        gloo = dist.ProcessGroupGloo(store, number, RANKS, timedelta(seconds=60))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return work(group, number)

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(rank, range(RANKS)))


def values(number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a rank has of `[2, 5]`: random numbers of unlike sizes, so that the order of a sum matters."""
    random = torch.Generator().manual_seed(number)
    return (torch.randn(2, 5, generator=random) * 10**number).to(dtype)


@pytest.fixture(params=[0, rounds.ONE_ROUND], ids=["as gloo does", "in one round"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "ONE_ROUND", request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_are_the_same_on_all_ranks(dtype: torch.dtype) -> None:
    def work(group: dist.ProcessGroup, number: int) -> Tensor:
        own = values(number, dtype)
        rounds.sum_over(own, group)
        return own

    first, *others = on_ranks(work)
    expected = sum(values(number, dtype).double() for number in range(RANKS))
    torch.testing.assert_close(first.double(), expected, rtol=0.02 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


@pytest.mark.usefixtures("way")
def test_gathers_are_in_the_order_of_ranks() -> None:
    def work(group: dist.ProcessGroup, number: int) -> Tensor:
        parts = torch.empty(RANKS, 2, 5)
        pending = rounds.begin_gather(parts, values(number), group)
        assert pending is not None
        pending.wait()
        return parts

    expected = torch.stack([values(number) for number in range(RANKS)])
    for found in on_ranks(work):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_large_tensors_are_left_to_gloo() -> None:
    assert rounds.in_one_round(torch.empty(rounds.ONE_ROUND // 8), 3)
    assert not rounds.in_one_round(torch.empty(rounds.ONE_ROUND // 8), 4)
