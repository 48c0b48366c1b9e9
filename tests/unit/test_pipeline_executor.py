"""The order of actions of one stage's ranks, whichever messages have arrived at each rank."""

import queue
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from llmtrain.comm.activity import Activity
from llmtrain.comm.decisions import Decision
from llmtrain.comm.messages import Channel
from llmtrain.parallel.pipeline.action_order import FixedOrder, MessageDrivenOrder
from llmtrain.parallel.pipeline.executor import Executor
from llmtrain.parallel.pipeline.stage_links import StageLinks
from llmtrain.parallel.pipeline.transport import Transport
from llmtrain.parallel.weight_gradients import WeightGradientQueue
from llmtrain.plan.pipeline.actions import Action, Kind, Schedule
from llmtrain.plan.pipeline.schedules import make_schedule
from llmtrain.plan.pipeline.stage_layout import StageLayout
from llmtrain.recipe.pipeline import ScheduleName
from llmtrain.sharding.gradient_sums import Received
from torch import Tensor, nn

COUNT, LIMIT = 12, 3


class Arrivals:
    """Messages that arrive in random order."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def arrived(self, channel: Channel) -> bool:
        return self._random.random() < 0.5

    def wait_any(self, channels: Sequence[Channel]) -> None:
        assert channels


def actions(stage: int, seed: int, decide: Callable[[Callable[[], bool]], bool]) -> list[Action]:
    stage_layout = StageLayout(stage=stage, first=stage, end=stage + 1, opens=stage == 0, closes=stage == 2, tied=False)
    links = StageLinks(
        Schedule(ranks=3, chunks=1, microbatches=COUNT, actions=()),
        stage,
        cast(Transport, Arrivals(seed)),
        lambda *_: torch.Size(()),
        lambda *_: None,
        Activity(),
    )
    return list(MessageDrivenOrder(stage_layout, COUNT, LIMIT, links, cast(Decision, decide)).actions())


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


@pytest.mark.parametrize("stage", range(3))
def test_no_more_are_under_way_than_the_limit(stage: int) -> None:
    under_way = most = 0
    for action in actions(stage, 3, lambda choose: choose()):
        under_way += 1 if action.kind is Kind.F else -1
        most = max(most, under_way)
    # The last stage takes its own losses first.
    assert most == (1 if stage == 2 else LIMIT)


class Recorder:
    """An engine and a transport that record the order of a rank's actions."""

    def __init__(self) -> None:
        self.did: list[str] = []

    @contextmanager
    def training_pass(self) -> Iterator[None]:
        yield

    def forward(self, action: Action, run: Callable[[], Tensor]) -> Tensor:
        return run()

    def backward(self, action: Action, run: Callable[[], None]) -> None:
        run()
        self.did.append("weights")

    def backward_inputs(self, action: Action, run: Callable[[], None], names: object, hold: object) -> None:
        run()

    def unit_of(self, parameter: object) -> str:
        return "unit"

    def backward_weights(self, action: Action, gradients: Iterable[Received]) -> None:
        assert len(list(gradients)) == 1
        self.did.append("weights")

    def expect(self, channel: Channel, shapes: object) -> None:
        pass

    def receive(self, channel: Channel) -> Tensor:
        return torch.ones(1, 1)

    def send(self, channel: Channel, values: Tensor) -> None:
        self.did.append("activations" if channel.target > channel.source else "gradient")

    def progress(self) -> None:
        self.did.append("progress")

    def flush(self) -> None:
        pass


def did(name: ScheduleName, rank: int, hands_back: bool = True) -> str:
    """Return the actions of one of three ranks with five microbatches, by initials."""
    recorder, schedule = Recorder(), replace(make_schedule(name, 3, 1, 5), hands_back=hands_back)
    stage_layout = StageLayout(stage=rank, first=rank, end=rank + 1, opens=rank == 0, closes=rank == 2, tied=False)
    weight, weight_gradients = nn.Parameter(torch.ones(1)), WeightGradientQueue()

    def forward(given: Tensor, targets: Tensor | None) -> Tensor:
        result = given * weight
        result.register_hook(defer)
        return result.sum() if stage_layout.closes else result

    def defer(gradient: Tensor) -> None:
        if weight_gradients.active:
            weight_gradients.push(weight, lambda: lambda: gradient)

    stage: Any = SimpleNamespace(layout=stage_layout, forward=forward)
    links = StageLinks(schedule, rank, recorder, lambda *_: torch.Size((1, 1)), lambda *_: None, Activity())  # type: ignore[arg-type]
    executor = Executor([stage], schedule, FixedOrder(schedule, rank), links, recorder, weight_gradients)  # type: ignore[arg-type]
    executor.train([torch.ones(1, 2) for _ in range(5)], 1.0)
    return "".join(one[0] for one in recorder.did)


def test_the_last_gradients_of_inputs_go_first() -> None:
    """While forward passes remain, the weights' gradients come first, because that frees memory earlier."""
    assert did("1f1b", 0) == "aa" + "aw" * 3 + "ww"
    assert did("1f1b", 1) == "aa" + "wga" * 3 + "gpw" * 2
    assert did("1f1b", 2) == "wg" * 4 + "gpw"
    assert did("1f1b", 1, hands_back=False) == "aa" + "wga" * 3 + "wg" * 2
    # With five microbatches, the fullest rank holds five.
    assert did("gpipe", 1) == "a" * 5 + "wg" + "gpw" * 4
    assert did("zero-bubble", 1, hands_back=True) == did("zero-bubble", 1, hands_back=False)
