"""Whether the first step of a pipeline on GPUs ends, where a host waits for its GPU to load a kernel, and a large send
ends only with its receive: a model of hosts and GPUs, for the orders that are planned."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import pytest
from llmtrain.plan.pipeline.actions import Action, Kind, Schedule
from llmtrain.plan.pipeline.schedules import make_schedule

CHUNKS = {"interleaved": 2, "breadth-first": 2, "zero-bubble-v": 2}
FIXED = ("gpipe", "1f1b", "interleaved", "breadth-first", "zero-bubble", "zero-bubble-v")
SIZES = [(ranks, times * ranks) for ranks, times in product((2, 3, 4), (1, 2, 3))]


class Message(NamedTuple):
    """Of a microbatch, from one stage to another."""

    source: int
    target: int
    microbatch: int


class Act(NamedTuple):
    """What a host does: receive or send a message, or load a kernel (no message), which waits for its GPU."""

    what: str
    message: Message | None = None


def acts(schedule: Schedule, rank: int, always: bool) -> Iterator[Act]:
    """Yield what a rank's host does in a step. always: whether it loads a kernel in each pass, and not only in the
    first one of each kind."""
    loaded = set[Kind]()
    for action in schedule.actions[rank]:
        stage, step = schedule.stage(rank, action.chunk), 1 if action.kind is Kind.F else -1
        yield from messages(schedule, action, "receive", stage - step, stage)
        if always or action.kind not in loaded:
            yield Act("load")
        loaded.add(action.kind)
        yield from messages(schedule, action, "send", stage, stage + step)


def messages(schedule: Schedule, action: Action, what: str, source: int, target: int) -> Iterator[Act]:
    inside = 0 <= source < schedule.stages and 0 <= target < schedule.stages
    if (
        action.kind is not Kind.W
        and inside
        and schedule.rank_and_chunk(source)[0] != schedule.rank_and_chunk(target)[0]
    ):
        yield Act(what, Message(source, target, action.microbatch))


class Step:
    """A step of all ranks. held: whether a send is posted only once its receive is."""

    def __init__(self, schedule: Schedule, always: bool, held: bool) -> None:
        self.acts = [list(acts(schedule, rank, always)) for rank in range(schedule.ranks)]
        self.places = {act: (rank, place) for rank, own in enumerate(self.acts) for place, act in enumerate(own)}
        self.at = [0] * schedule.ranks
        self.over, self.held = set[Message](), held

    def ends(self) -> bool:
        """Run the step; return whether all hosts come to its end."""
        moved = True
        while moved:
            moved = self._exchange()
            for rank, own in enumerate(self.acts):
                while self.at[rank] < len(own) and self._goes_on(rank):
                    self.at[rank], moved = self.at[rank] + 1, True
        return all(at == len(own) for at, own in zip(self.at, self.acts, strict=True))

    def _goes_on(self, rank: int) -> bool:
        """A load waits until all that its GPU has is over. Who asks for a gradient releases its activation, so that one
        must be posted."""
        own, at = self.acts[rank], self.at[rank]
        if self.held and own[at].what == "receive" and (asked := own[at].message) and asked.source > asked.target:
            return self._is_passed(Act("receive", Message(asked.target, asked.source, asked.microbatch)))
        return own[at].what != "load" or all(
            act.message is None or act.message in self.over or not self._on_gpu(act) for act in own[:at]
        )

    def _on_gpu(self, act: Act) -> bool:
        """Whether an act that its host has passed is on the GPU."""
        return act.what == "receive" or not self.held or self._is_passed(Act("receive", act.message))

    def _is_passed(self, act: Act) -> bool:
        rank, place = self.places[act]
        return place < self.at[rank]

    def _exchange(self) -> bool:
        """End the messages of which both ends are on GPUs that have received all messages before; return whether there
        are new ones."""
        before = len(self.over)
        for message in (act.message for act in self.places if act.message is not None):
            if self._is_ready(Act("send", message)) and self._is_ready(Act("receive", message)):
                self.over.add(message)
        return len(self.over) > before

    def _is_ready(self, act: Act) -> bool:
        rank, place = self.places[act]
        received = (one.message for one in self.acts[rank][:place] if one.what == "receive")
        return self._is_passed(act) and all(message in self.over for message in received)


def step(name: str, ranks: int, microbatches: int, always: bool, held: bool) -> Step:
    return Step(make_schedule(name, ranks, CHUNKS.get(name, 1), microbatches), always, held)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", FIXED)
def test_a_step_ends_if_sends_are_held(name: str, ranks: int, microbatches: int) -> None:
    """Wherever kernels are loaded, so that it does not matter which pass has a kernel first."""
    assert step(name, ranks, microbatches, always=False, held=True).ends()
    assert step(name, ranks, microbatches, always=True, held=True).ends()


@pytest.mark.parametrize("name", ["breadth-first", "zero-bubble-v"])
def test_a_first_step_hangs_if_sends_are_not_held(name: str) -> None:
    assert not step(name, 2, 4, always=False, held=False).ends()


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
def test_a_step_ends_without_that_in_other_orders(name: str) -> None:
    assert step(name, 2, 4, always=False, held=False).ends()
