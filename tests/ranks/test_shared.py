"""Shared memory between the ranks of one machine gives gloo's results, at 2 and at 3 ranks."""

from collections.abc import Callable

import pytest

from tests.ranks.forks import answers_by_world

Found = Callable[[int], list[dict[str, object]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return what each of `world` ranks found."""
    return answers_by_world("shared_ranks.py", tmp_path_factory)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("how", ["one by one", "several under way"])
def test_it_carries_what_gloo_would(world: int, how: str, found: Found) -> None:
    for rank in found(world):
        operations = rank[how]
        assert isinstance(operations, dict)
        assert len(operations) == 10
        assert all(operations.values()), operations


def test_slots_take_no_more_than_is_said(found: Found) -> None:
    assert {rank["bytes"] for rank in found(2)} == {2 * 4096}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("where", ["where one forbids it", "where one is on another machine"])
def test_all_ranks_do_without_it(world: int, where: str, found: Found) -> None:
    assert [rank[where] for rank in found(world)] == [False] * world
