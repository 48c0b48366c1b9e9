"""What the ranks of one stage do next, whatever has arrived at each."""

import queue
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from llmtrain.cluster.watch import Watch
from llmtrain.parallel.pipeline.actions import Action, Kind, Schedule
from llmtrain.parallel.pipeline.executor import Executor
from llmtrain.parallel.pipeline.pieces import Piece
from llmtrain.parallel.pipeline.transport import Channel

COUNT, LIMIT = 12, 3


class Arrivals:
    """Messages that arrive in an order of their own."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def arrived(self, channel: Channel) -> bool:
        return self._random.random() < 0.5

    def wait_any(self, channels: Sequence[Channel]) -> None:
        assert channels


def actions(stage: int, seed: int, first_says: Callable[[Callable[[], bool]], bool]) -> list[Action]:
    piece = Piece(stage, stage, stage + 1, opens=stage == 0, closes=stage == 2, tied=False)
    stages, schedule = [SimpleNamespace(piece=piece)], Schedule(3, 1, COUNT, ())
    executor = Executor(
        stages, stage, schedule, LIMIT, None, Arrivals(seed), None, None, lambda *_: None, Watch(), first_says
    )
    return list(executor._as_it_comes(SimpleNamespace(rows=range(COUNT))))


@pytest.mark.parametrize("stage", range(3))
def test_every_rank_of_a_stage_does_what_the_first_does(stage: int) -> None:
    told: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def says(choose: Callable[[], bool]) -> bool:
        told.put(chosen := choose())
        return chosen

    with ThreadPoolExecutor(1) as other:
        second = other.submit(actions, stage, 1, lambda choose: told.get(timeout=60))
        first = actions(stage, 0, says)
        assert second.result() == first
    assert [one.microbatch for one in first if one.kind is Kind.F] == list(range(COUNT))
    assert [one.microbatch for one in first if one.kind is Kind.B] == list(range(COUNT))
    assert stage == 2 or first != actions(stage, 1, lambda choose: choose()), "arrivals differ"


def test_no_more_are_under_way_than_the_limit() -> None:
    under_way = most = 0
    for action in actions(0, 3, lambda choose: choose()):
        under_way += 1 if action.kind is Kind.F else -1
        most = max(most, under_way)
    assert most == LIMIT
