"""Records when a pipeline's actions ran on each rank, and computes bubbles, durations and message times from that."""

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

# After a wait of this many seconds, a message arrived at the end of the wait. Shorter waits prove nothing: a slowed
# rank may stop for two milliseconds while it takes a message that is already there.
WAITED = 3e-3
# Most seconds that a rank needs to take a message that is already there, if the rank is not slowed.
AT_ONCE = 2e-4


@dataclass(frozen=True, kw_only=True)
class Done:
    """A finished action; times in seconds of the machine's clock, which all processes share. start: when its inputs
    were there. after: seconds that it ran after its result was ready to send. idle: seconds that the rank waited for
    its inputs."""

    stage: int
    microbatch: int
    kind: str
    start: float
    end: float
    after: float = 0.0
    idle: float = 0.0


class Message(NamedTuple):
    """The message with an action's result."""

    stage: int
    microbatch: int
    kind: str


class Delivery(NamedTuple):
    """The transfer of a message to the stage `to`. seconds: its duration; an upper bound if no rank waited for it."""

    to: int
    seconds: float
    waited: bool


@dataclass
class Recorder:
    """One rank's actions of all steps, in order; the start and end of each step, and its CPU seconds."""

    actions: list[Done] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    _got: float = 0.0
    _after: float = 0.0
    _idle: float = 0.0

    def act(self, stage: int, microbatch: int, kind: str, run: Callable[[], Any]) -> Any:
        """Run an action and record it."""
        self._got, self._after = time.perf_counter(), 0.0
        result = run()
        self.actions.append(
            Done(
                stage=stage,
                microbatch=microbatch,
                kind=kind,
                start=self._got,
                end=time.perf_counter(),
                after=self._after,
                idle=self._idle,
            )
        )
        self._idle = 0.0
        return result

    def finish(self, run: Callable[[], None]) -> None:
        """Run the part of an action after it has sent its result."""
        began = time.perf_counter()
        run()
        self._after = time.perf_counter() - began

    def wait(self, run: Callable[[], Any]) -> Any:
        """Call `run`, which waits for the inputs of the running or the next action, and count its time as idle."""
        began = time.perf_counter()
        result = run()
        self._got = time.perf_counter()
        self._idle += self._got - began
        return result

    def by_step(self) -> list[list[Done]]:
        """Return the actions of each step."""
        count = len(self.actions) // len(self.steps)
        return [self.actions[first : first + count] for first in range(0, len(self.actions), count)]


class RecordingTransport:
    """A transport that records its receives."""

    def __init__(self, inner: Transport, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def receive(self, channel: Channel) -> Tensor:
        """Return the next message of a channel."""
        return self._recorder.wait(lambda: self._inner.receive(channel))

    def wait_any(self, channels: Sequence[Channel]) -> None:
        """Wait until the next message of any of `channels` has arrived."""
        self._recorder.wait(lambda: self._inner.wait_any(channels))


def record_run(run: Run, recorder: Recorder) -> None:
    """Record the actions of a run's pipeline."""
    executor, links, engine = run.executor, run.executor._links, run.engine
    schedule, act, inner = executor._schedule, executor._act, engine.backward_weights
    links._transport = RecordingTransport(links._transport, recorder)  # type: ignore[assignment]

    def recorded(action: Action, step: Any) -> None:
        stage = schedule.stage(links._rank, action.chunk)
        recorder.act(stage, action.microbatch, action.kind.value, lambda: act(action, step))

    executor._act = recorded  # type: ignore[method-assign]
    if not schedule.splits_backward:
        engine.backward_weights = lambda *given: recorder.finish(lambda: inner(*given))  # type: ignore[method-assign]


def step_seconds(recorders: Sequence[Recorder]) -> list[float]:
    """Return the duration of each step, from the first stage's start to the last rank's end. recorders: by rank; the
    first rank has the first stage. Other ranks may leave the barrier earlier, but can then only wait."""
    return [max(end for _, end in step) - step[0][0] for step in zip(*(w.steps for w in recorders), strict=True)]


def bubbles(recorders: Sequence[Recorder]) -> list[float]:
    """Return each step's bubble: the share of all ranks' time without an action."""
    steps = zip(*(recorder.by_step() for recorder in recorders), strict=True)
    busy = [sum(done.end - done.start for rank in step for done in rank) for step in steps]
    return [1 - b / (seconds * len(recorders)) for b, seconds in zip(busy, step_seconds(recorders), strict=True)]


def ran(actions: Sequence[Done]) -> list[float]:
    """Return the seconds of each action of a rank's step, without the time between actions."""
    return [done.end - done.start for done in actions]


def took(actions: Sequence[Done]) -> list[float]:
    """Return the seconds of each action of a rank's step, with the rank's work between the previous action and this
    one. If the rank waits for inputs, it does that work meanwhile, and it does not count."""
    ends = [None, *(done.end for done in actions)]
    return [
        done.end - (done.start if ended is None or done.idle > AT_ONCE else ended)
        for done, ended in zip(actions, ends, strict=False)
    ]


def durations(
    steps: Iterable[Sequence[Done]], of: Callable[[Sequence[Done]], list[float]] = ran
) -> dict[str, list[float]]:
    """Return the mean duration of an action of each stage, by kind. A combined backward pass counts as W after it has
    sent the inputs' gradient, if a pass of the stage sends it first; the rest is B. steps: lists of the actions of a
    rank's step, from any ranks and steps. of: returns the seconds of such actions."""
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


def deliveries(step: Sequence[Sequence[Done]], busy: Sequence[float] = ()) -> dict[Message, Delivery]:
    """Return the duration of each message of a step over a free link: from when the sending action had its result to
    the start of the action that needs it. step: actions by rank, in order. busy: seconds that a message occupies each
    hop's link; empty for none."""
    found: dict[Message, Delivery] = {}
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
        found[own] = Delivery(to, start - sent, needed[by].idle > WAITED)
    return found


def transfers(recorders: Sequence[Recorder], busy: Sequence[float]) -> list[float]:
    """Return the duration of a message over each hop: the mean of both directions' medians, of messages that a rank
    waited for. busy: see `deliveries`."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in zip(*(recorder.by_step() for recorder in recorders), strict=True):
        for message, delivery in deliveries(step, busy).items():
            if delivery.waited:
                found[message.stage, delivery.to].append(max(delivery.seconds, 0.0))
    both = [[found[ends] for ends in ((hop, hop + 1), (hop + 1, hop)) if found[ends]] for hop in range(len(busy))]
    return [fmean(map(median, known)) if known else 0.0 for known in both]


def transfer(recorders: Sequence[Recorder]) -> float:
    """Return the duration of a message if all links are equal: the median of messages that a rank waited for."""
    steps = zip(*map(Recorder.by_step, recorders), strict=True)
    found = [delivery.seconds for step in steps for delivery in deliveries(step).values() if delivery.waited]
    return max(median(found), 0.0) if found else 0.0


def peak_live(recorders: Sequence[Recorder], last: str) -> list[int]:
    """Return each rank's peak number of live microbatches, counted per stage. last: kind of action that frees one."""
    return [max(_peak(step, last) for step in recorder.by_step()) for recorder in recorders]


def _peak(step: Sequence[Done], last: str) -> int:
    live = peak = 0
    for done in step:
        live += (done.kind == "F") - (done.kind == last)
        peak = max(peak, live)
    return peak
