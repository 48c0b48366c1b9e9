"""What a comparison of replicas reads."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llmtrain.comm.activity import Activity
from llmtrain.errors import RunFailedError
from llmtrain.training import replica_check


def rank(number: int, held: list[list[int]], values: list[list[int]]) -> Any:
    """Return rank `number` of two. held, values: what both ranks say; the rank's own is replaced by what it says."""
    said = iter((held, values))

    def gather_all(own: list[int]) -> list[list[int]]:
        table = [list(one) for one in next(said)]
        table[number] = own
        return table

    layout = SimpleNamespace(world=2)
    return SimpleNamespace(
        rank=number, layout=layout, gather_all=gather_all, activity=Activity(number), host_of=lambda other: "node1"
    )


def engine(reads: list[str]) -> Any:
    """Return an engine of no units; `_held` is replaced."""
    return SimpleNamespace(weights=SimpleNamespace(updates=SimpleNamespace(finish=lambda: reads.clear())))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of states whose values are read."""
    found = list[str]()

    def held(engine: Any, kind: str) -> Any:
        def values() -> Any:
            found.append(kind)
            yield torch.ones(4)

        yield [(kind, 0, 4)], values()

    monkeypatch.setattr(replica_check, "_held", held)
    return found


def test_only_values_that_another_rank_holds_are_read(reads: list[str]) -> None:
    """The other rank holds other optimizer states, as with zero.stage 3, and the same of all other kinds."""
    names = [replica_check._checksum_of_ranges([([(kind, 0, 4)], iter(()))]) for kind in replica_check.KINDS]
    names[1] += 1
    value = replica_check._checksum_of_values([([], iter([torch.ones(4)]))], lambda: None)
    replica_check.compare(engine(reads), rank(1, [names, []], [[value, 5, value, value], []]), 3, 2)
    assert reads == [kind for kind in replica_check.KINDS if kind != "optimizer states"]


def test_different_values_of_two_ranks_are_told(reads: list[str]) -> None:
    names = [replica_check._checksum_of_ranges([([(kind, 0, 4)], iter(()))]) for kind in replica_check.KINDS]
    with pytest.raises(
        RunFailedError, match="rank 0 on node1 and rank 1 on node1 hold different weights, none of them in a majority"
    ):
        replica_check.compare(engine(reads), rank(1, [names, []], [[7, 7, 7, 7], []]), 3, 2)


def test_the_watchdog_sees_each_chunk_that_is_compared() -> None:
    told = list[int]()
    held: replica_check.Held = ([], iter([torch.ones(4), torch.ones(2)]))
    replica_check._checksum_of_values([held, held], lambda: told.append(1))
    assert len(told) == 2
