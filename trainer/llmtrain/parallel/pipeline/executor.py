"""Runs a pipeline's actions: each rank computes its pieces of the model and passes on what comes out."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from llmtrain.comm.activity import Activity
from llmtrain.parallel.pipeline.stage import Stage
from llmtrain.parallel.pipeline.transport import Channel, Transport
from llmtrain.parallel.pipeline.weight_gradient_queue import PendingProducts, WeightGradientQueue, gradients
from llmtrain.plan.pipeline.actions import Action, Kind, Schedule, hands_back_first, peak_live
from llmtrain.sharding.engine import Engine
from llmtrain.sharding.gradients import BackwardPass, Received

# Shape of what a stage hands on for a microbatch of so many sequences and tokens of each.
ShapeOf = Callable[[int, int], torch.Size]

# Told of every message's channel and bytes.
CountSent = Callable[[Channel, int], None]

# Returns what one of several ranks chooses.
FirstSays = Callable[[Callable[[], bool]], bool]


@dataclass(frozen=True)
class _Passed:
    """What a forward pass leaves for its backward pass."""

    given: Tensor
    result: Tensor


@dataclass
class _Step:
    """The microbatches of one optimizer step, int64 `[sequences, tokens + 1]`. factor: on each one's mean loss in the
    backward pass. ahead: forward passes still to come. done: backward passes, by unit."""

    rows: Sequence[Tensor]
    factor: float
    ahead: int
    passed: dict[tuple[int, int], _Passed] = field(default_factory=dict)
    pending: dict[tuple[int, int], tuple[list[Received], PendingProducts]] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)


class Executor:
    """One rank's part of a pipeline, which may be the whole of it.

    stages: this rank's, by chunk. limit: microbatches under way at once where the schedule has no actions of its own
    and what has arrived says what is next; first_says: has the first of the ranks that share each layer choose it, as
    all of them have to do the same. weight_gradients: for schedules where gradients of weights may come after those of
    inputs. count: told of every message sent. activity: of waiting for one.
    """

    def __init__(
        self, stages: Sequence[Stage], rank: int, schedule: Schedule, limit: int, engine: Engine,
        transport: Transport | None, shape_of: ShapeOf, weight_gradients: WeightGradientQueue | None, count: CountSent,
        activity: Activity, first_says: FirstSays,
    ) -> None:  # fmt: skip
        self._stages, self._rank, self._schedule, self._limit = stages, rank, schedule, limit
        self._engine, self._transport, self._shape_of = engine, transport, shape_of
        self._weight_gradients, self._count, self._activity, self._first_says = (
            weight_gradients,
            count,
            activity,
            first_says,
        )
        # Of microbatches of a piece, on the rank that holds most.
        self._most_live = max(peak_live(schedule)) if schedule.actions else min(limit, schedule.microbatches)
        # Of each unit, by each microbatch: two chunks may share one.
        self._passes = Counter(name for stage in stages for name in stage.layout.units)
        # Between two pieces on one rank.
        self._handed: dict[Channel, deque[Tensor]] = {}

    def train(self, rows: Sequence[Tensor], factor: float) -> Tensor:
        """Pass microbatches forward and backward; return the sum of their mean losses, 0 but where the model ends.

        Collective over the pipeline.
        """
        step = _Step(rows, factor, len(rows) * len(self._stages))
        self._expect(rows, backward=True)
        with self._engine.training_pass():
            for action in self._schedule.actions[self._rank] if self._schedule.actions else self._as_it_comes(step):
                self._act(action, step)
            self._flush()
        return sum(step.losses, torch.zeros((), device=rows[0].device))

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield the mean losses of microbatches, where the model ends, some at a time; and how many those were.
        Collective over the pipeline."""
        # So many at a time as keep all stages busy, and no more than memory has room for.
        together = 2 * self._schedule.stages
        with self._engine.forward_pass():
            for first in range(0, len(rows), together):
                some = rows[first : first + together]
                found: list[Tensor] = []
                self._expect(some, backward=False)
                for chunk in range(len(self._stages)):
                    found += [loss for one in some if (loss := self._pass(chunk, one)[1]).ndim == 0]
                self._flush()
                yield len(some), found

    def close(self) -> None:
        """End what runs in the background."""
        if self._transport is not None:
            self._transport.close()

    def _act(self, action: Action, step: _Step) -> None:
        key = (action.chunk, action.microbatch)
        match action.kind:
            case Kind.F:
                given, result = self._pass(action.chunk, step.rows[action.microbatch])
                if result.ndim == 0:
                    step.losses.append(result.detach())
                step.passed[key] = _Passed(given, result)
                step.ahead -= 1
            case Kind.B if self._schedule.splits_backward:
                step.pending[key] = self._backward_inputs(action.chunk, step.passed.pop(key), step.factor)
            case Kind.B if self._hands_back_first(action.chunk, step):
                received, pending = self._backward_inputs(action.chunk, step.passed.pop(key), step.factor)
                self._engine.backward_weights(
                    received, self._products(pending), self._backward_passes(action.chunk, step)
                )
            case Kind.B:
                passed = step.passed.pop(key)
                run = partial(self._backward, action.chunk, passed, step.factor)
                self._engine.backward(run, self._backward_passes(action.chunk, step))
                self._hand_back(action.chunk, passed)
            case Kind.W:
                received, pending = step.pending.pop(key)
                self._engine.backward_weights(
                    received, self._products(pending), self._backward_passes(action.chunk, step)
                )

    def _hands_back_first(self, chunk: int, step: _Step) -> bool:
        """Whether another rank has the inputs' gradient of the next backward pass before this one has the weights'."""
        stage_layout, schedule = self._stages[chunk].layout, self._schedule
        if not schedule.hands_back or stage_layout.opens or schedule.place(stage_layout.stage - 1)[0] == self._rank:
            return False
        return hands_back_first(step.ahead, len(step.passed), self._most_live)

    def _backward_passes(self, chunk: int, step: _Step) -> list[BackwardPass]:
        """Count and return a chunk's next backward pass through each of its units; two chunks may share one."""
        stage_layout, found = self._stages[chunk].layout, []
        for name in stage_layout.units:
            done = step.done[name] = step.done.get(name, 0) + 1
            passes = len(step.rows) * self._passes[name]
            # A tied head computes with the tokens alone.
            leading = name == "embedding" and not stage_layout.opens
            found.append(BackwardPass(name, done == 1, done == passes, leading))
        return found

    def _pass(self, chunk: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Do a forward pass; return what came in and what came out."""
        stage = self._stages[chunk]
        self._activity.moving()
        if stage.layout.opens:
            given = rows[:, :-1]
        else:
            given = self._receive(Channel(stage.layout.stage - 1, stage.layout.stage)).requires_grad_(
                torch.is_grad_enabled()
            )
        result = stage.forward(given, rows[:, 1:] if stage.layout.closes else None)
        if not stage.layout.closes:
            self._send(Channel(stage.layout.stage, stage.layout.stage + 1), result.detach())
        return given, result

    def _backward(self, chunk: int, passed: _Passed, factor: float) -> None:
        stage_layout = self._stages[chunk].layout
        if stage_layout.closes:
            (passed.result * factor).backward()
        else:
            passed.result.backward(self._receive(Channel(stage_layout.stage + 1, stage_layout.stage)))

    def _backward_inputs(self, chunk: int, passed: _Passed, factor: float) -> tuple[list[Received], PendingProducts]:
        """Do a backward pass of the inputs; return of the weights' gradients those that came, and what is left."""
        weight_gradients, run = self._weight_gradients, partial(self._backward, chunk, passed, factor)
        assert weight_gradients is not None
        with weight_gradients.collecting() as pending:
            received = self._engine.backward_inputs(run, self._stages[chunk].layout.units)
        self._hand_back(chunk, passed)
        return received, pending

    def _products(self, pending: PendingProducts) -> Iterator[Received]:
        """Yield gradients of weights, while what was handed back is on its way."""
        for parameter, gradient in gradients(pending):
            if self._transport is not None:
                self._transport.progress()
            yield parameter, gradient

    def _hand_back(self, chunk: int, passed: _Passed) -> None:
        stage_layout = self._stages[chunk].layout
        if not stage_layout.opens:
            assert passed.given.grad is not None
            self._send(Channel(stage_layout.stage, stage_layout.stage - 1), passed.given.grad)

    def _as_it_comes(self, step: _Step) -> Iterator[Action]:
        """Yield what to do next by what has arrived, backward passes first (AxoNN, Algorithm 2)."""
        forward = backward = 0
        while backward < len(step.rows):
            if self._first_says(partial(self._is_backward_next, forward, backward, len(step.rows))):
                yield Action(backward, 0, Kind.B)
                backward += 1
            else:
                yield Action(forward, 0, Kind.F)
                forward += 1

    def _is_backward_next(self, forward: int, backward: int, count: int) -> bool:
        """Wait until something can be done after so many passes of `count` microbatches, and return what it is."""
        transport, stage_layout = self._transport, self._stages[0].layout
        assert transport is not None
        below, above = (
            Channel(stage_layout.stage - 1, stage_layout.stage),
            Channel(stage_layout.stage + 1, stage_layout.stage),
        )
        while True:
            # The last stage has its gradients from its own loss, the first one its tokens.
            if forward > backward and (stage_layout.closes or transport.arrived(above)):
                return True
            if forward < count and (
                forward - backward < self._limit if stage_layout.opens else transport.arrived(below)
            ):
                return False
            awaited, not_below = [above] if forward > backward else [], stage_layout.opens or forward == count
            self._activity.wait(partial(transport.wait_any, awaited if not_below else [*awaited, below]))

    def _expect(self, rows: Sequence[Tensor], backward: bool) -> None:
        """Post what will come from other ranks."""
        shapes = [self._shape_of(len(one), one.shape[1] - 1) for one in rows]
        for stage in self._stages:
            here, last = stage.layout.stage, self._schedule.stages - 1
            sources = ([here - 1] if here else []) + ([here + 1] if backward and here < last else [])
            for source in sources:
                if self._transport is not None and self._schedule.place(source)[0] != self._rank:
                    self._transport.expect(Channel(source, here), shapes)

    def _receive(self, channel: Channel) -> Tensor:
        if self._schedule.place(channel.source)[0] == self._rank:
            return self._handed[channel].popleft()
        assert self._transport is not None
        return self._activity.wait(partial(self._transport.receive, channel))

    def _send(self, channel: Channel, values: Tensor) -> None:
        if self._schedule.place(channel.target)[0] == self._rank:
            self._handed.setdefault(channel, deque()).append(values)
        else:
            assert self._transport is not None
            self._count(channel, values.nbytes)
            self._transport.send(channel, values)

    def _flush(self) -> None:
        if self._transport is not None:
            self._activity.wait(self._transport.flush)


def channels(schedule: Schedule) -> Iterable[Channel]:
    """Yield every channel between stages on different ranks."""
    for stage in range(schedule.stages - 1):
        if schedule.place(stage)[0] != schedule.place(stage + 1)[0]:
            yield from (Channel(stage, stage + 1), Channel(stage + 1, stage))
