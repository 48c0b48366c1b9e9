"""When a pipeline's actions ran on each rank, and what follows from that: waiting, durations, transfers."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

from llmtrain.comm.messages import Channel
from llmtrain.parallel.pipeline.transport import Transport
from llmtrain.plan.pipeline.actions import Action
from llmtrain.training.run import Run
from torch import Tensor

# Seconds of waiting from which on a message came when it says so: a rank that is slowed may stop for two milliseconds
# while it takes one that is there.
WAITED = 3e-3
# Seconds that a rank needs at most to take what is there, if it is not slowed.
AT_ONCE = 2e-4


class Done(NamedTuple):
    """An action that ran; times in seconds of the machine's clock, which all its processes share. start: once what it
    needs was there. after: for how long it went on when what it hands on was ready. idle: for how long the rank stood
    still for what it needs."""

    stage: int
    microbatch: int
    kind: str
    start: float
    end: float
    after: float = 0.0
    idle: float = 0.0


class Message(NamedTuple):
    """What an action hands on."""

    stage: int
    microbatch: int
    kind: str


class Way(NamedTuple):
    """Of a message to the stage `to`: how long it took, or no longer than where no rank waited for it."""

    to: int
    seconds: float
    waited: bool


@dataclass
class Watch:
    """One rank's actions, those of all steps one after another; when each step began and ended, and its processor time
    in seconds."""

    actions: list[Done] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    _got: float = 0.0
    _after: float = 0.0
    _idle: float = 0.0

    def act(self, stage: int, microbatch: int, kind: str, run: Callable[[], Any]) -> Any:
        """Run an action and note it."""
        self._got, self._after = time.perf_counter(), 0.0
        result = run()
        self.actions.append(Done(stage, microbatch, kind, self._got, time.perf_counter(), self._after, self._idle))
        self._idle = 0.0
        return result

    def go_on(self, run: Callable[[], None]) -> None:
        """Do what the running action has left to do once it has handed on its result."""
        began = time.perf_counter()
        run()
        self._after = time.perf_counter() - began

    def stand_still(self, run: Callable[[], Any]) -> Any:
        """Wait for what the running action needs, or the next one: nothing of it was computed before."""
        began = time.perf_counter()
        result = run()
        self._got = time.perf_counter()
        self._idle += self._got - began
        return result

    def by_step(self) -> list[list[Done]]:
        """Return the actions of each step."""
        count = len(self.actions) // len(self.steps)
        return [self.actions[first : first + count] for first in range(0, len(self.actions), count)]


class WatchedTransport:
    """A transport whose receives are noted."""

    def __init__(self, inner: Transport, watch: Watch) -> None:
        self._inner, self._watch = inner, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def receive(self, channel: Channel) -> Tensor:
        """Return the next message of a channel."""
        return self._watch.stand_still(lambda: self._inner.receive(channel))

    def wait_any(self, channels: Sequence[Channel]) -> None:
        """Wait until the next message of any of `channels` is there."""
        self._watch.stand_still(lambda: self._inner.wait_any(channels))


def watch_run(run: Run, watch: Watch) -> None:
    """Note what a run's pipeline does."""
    executor, links, engine = run.executor, run.executor._links, run.engine
    schedule, act, inner = executor._schedule, executor._act, engine.backward_weights
    links._transport = WatchedTransport(links._transport, watch)  # type: ignore[assignment]

    def watched(action: Action, step: Any) -> None:
        stage = schedule.stage(links._rank, action.chunk)
        watch.act(stage, action.microbatch, action.kind.value, lambda: act(action, step))

    executor._act = watched  # type: ignore[method-assign]
    if not schedule.splits_backward:
        engine.backward_weights = lambda *given: watch.go_on(lambda: inner(*given))  # type: ignore[method-assign]


def step_seconds(watches: Sequence[Watch]) -> list[float]:
    """Return how long each step took, from the first stage's start to the last rank's end. watches: by rank, of which
    the first has the first stage: others may come sooner out of what they all waited in, but to no avail."""
    return [max(end for _, end in step) - step[0][0] for step in zip(*(w.steps for w in watches), strict=True)]


def bubbles(watches: Sequence[Watch]) -> list[float]:
    """Return the share of all ranks' time, of each step, in which they wait."""
    steps = zip(*(watch.by_step() for watch in watches), strict=True)
    busy = [sum(done.end - done.start for rank in step for done in rank) for step in steps]
    return [1 - b / (seconds * len(watches)) for b, seconds in zip(busy, step_seconds(watches), strict=True)]


def ran(actions: Sequence[Done]) -> list[float]:
    """Return the seconds of each action of a rank's step alone."""
    return [done.end - done.start for done in actions]


def took(actions: Sequence[Done]) -> list[float]:
    """Return the seconds of each action of a rank's step, with what the rank does to come to it: where it has to wait,
    it does that meanwhile."""
    ends = [None, *(done.end for done in actions)]
    return [
        done.end - (done.start if ended is None or done.idle > AT_ONCE else ended)
        for done, ended in zip(actions, ends, strict=False)
    ]


def durations(
    steps: Iterable[Sequence[Done]], of: Callable[[Sequence[Done]], list[float]] = ran
) -> dict[str, list[float]]:
    """Return, by kind, how long an action of each stage takes, the mean of all. Of backward passes that do it all, W is
    what comes after they have handed back the inputs' gradient, where any of the stage does that first; B the rest.
    steps: the actions of a rank's step, of any ranks and steps. of: seconds of such actions."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    after: dict[int, list[float]] = defaultdict(list)
    for actions in steps:
        for done, seconds in zip(actions, of(actions), strict=True):
            found[done.kind][done.stage].append(seconds)
            if done.after:
                after[done.stage].append(done.after)
    means = {kind: [fmean(stages[stage]) for stage in sorted(stages)] for kind, stages in found.items()}
    if "W" not in means:
        means["W"] = [fmean(after[stage]) if after[stage] else 0.0 for stage in range(len(means["B"]))]
        means["B"] = [whole - weights for whole, weights in zip(means["B"], means["W"], strict=True)]
    return means


def ways(step: Sequence[Sequence[Done]], busy: Sequence[float] = ()) -> dict[Message, Way]:
    """Return how long each message of a step took over a free link: from when the action that made it had it to the
    start of the one that needs it. step: actions by rank, in order. busy: seconds in which a message keeps each hop's
    link from the next one; none where empty."""
    found: dict[Message, Way] = {}
    rank_of = {done.stage: rank for rank, actions in enumerate(step) for done in actions}
    needed = {Message(done.stage, done.microbatch, done.kind): done for actions in step for done in actions}
    free: dict[tuple[int, int], float] = defaultdict(float)
    for done in sorted(needed.values(), key=lambda done: done.end - done.after):
        own, to = Message(done.stage, done.microbatch, done.kind), done.stage + (1 if done.kind == "F" else -1)
        by = own._replace(stage=to)
        if by not in needed or done.kind == "W" or rank_of[to] == rank_of[done.stage]:
            continue
        sent, start = max(done.end - done.after, free[done.stage, to]), needed[by].start
        free[done.stage, to] = sent + (busy[min(done.stage, to)] if busy else 0.0)
        found[own] = Way(to, start - sent, needed[by].idle > WAITED)
    return found


def transfers(watches: Sequence[Watch], busy: Sequence[float]) -> list[float]:
    """Return how long a message takes over each hop, the mean of both ways' medians of those that a rank was waiting
    for. busy: see `ways`."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in zip(*(watch.by_step() for watch in watches), strict=True):
        for message, way in ways(step, busy).items():
            if way.waited:
                found[message.stage, way.to].append(max(way.seconds, 0.0))
    both = [[found[way] for way in ((hop, hop + 1), (hop + 1, hop)) if found[way]] for hop in range(len(busy))]
    return [fmean(map(median, known)) if known else 0.0 for known in both]


def transfer(watches: Sequence[Watch]) -> float:
    """Return how long a message takes where all links are alike: the median of those that a rank was waiting for."""
    steps = zip(*map(Watch.by_step, watches), strict=True)
    found = [way.seconds for step in steps for way in ways(step).values() if way.waited]
    return max(median(found), 0.0) if found else 0.0


def peak_live(watches: Sequence[Watch], last: str) -> list[int]:
    """Return the most microbatches of one piece of the model that each rank held. last: the kind that frees them."""
    return [max(_peak(step, last) for step in watch.by_step()) for watch in watches]


def _peak(step: Sequence[Done], last: str) -> int:
    live = peak = 0
    for done in step:
        live += (done.kind == "F") - (done.kind == last)
        peak = max(peak, live)
    return peak
