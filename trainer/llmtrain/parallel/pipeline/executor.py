"""Runs a pipeline's actions: each rank computes its stages of the model and sends the results to the next ranks."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from llmtrain.comm.messages import Channel
from llmtrain.parallel.pipeline.action_order import ActionOrder
from llmtrain.parallel.pipeline.stage import Stage
from llmtrain.parallel.pipeline.stage_links import StageLinks
from llmtrain.parallel.weight_gradients import PendingProducts, WeightGradientQueue, gradients
from llmtrain.plan.pipeline.actions import Action, Kind, Schedule, hands_back_first
from llmtrain.sharding.engine import Engine
from llmtrain.sharding.gradient_sums import BackwardPass, Received


@dataclass(frozen=True)
class _Forwarded:
    """What a forward pass keeps for its backward pass: the input and the output of the stage."""

    input: Tensor
    output: Tensor


@dataclass(frozen=True)
class _Deferred:
    """A microbatch's weight gradients between the backward pass of its inputs and that of its weights.

    received: those that autograd has computed. products: those that are still to be computed.
    """

    received: list[Received]
    products: PendingProducts


@dataclass
class _Step:
    """The state of one optimizer step.

    rows: its microbatches, int64 `[sequences, tokens + 1]`. factor: multiplies each mean loss in the backward pass.
    forwards_left: forward passes still to run. forwarded, deferred: by (chunk, microbatch). backwards_done: backward
    passes by unit.
    """

    rows: Sequence[Tensor]
    factor: float
    forwards_left: int
    forwarded: dict[tuple[int, int], _Forwarded] = field(default_factory=dict)
    deferred: dict[tuple[int, int], _Deferred] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    backwards_done: Counter[str] = field(default_factory=Counter)


class Executor:
    """One rank's part of a pipeline; in a run without a pipeline, the whole model.

    stages: this rank's, by chunk. weight_gradients: the queue that the layers of `stages` use.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        order: ActionOrder,
        links: StageLinks,
        engine: Engine,
        weight_gradients: WeightGradientQueue,
    ) -> None:
        self._stages, self._schedule, self._order, self._links = stages, schedule, order, links
        self._engine, self._weight_gradients = engine, weight_gradients
        # Passes through each unit per microbatch: two chunks may share a unit.
        self._passes = Counter(name for stage in stages for name in stage.layout.units)

    def train(self, rows: Sequence[Tensor], factor: float) -> Tensor:
        """Run forward and backward passes of all microbatches; return the sum of their mean losses, which is 0 on ranks
        without the last stage.

        Collective over the pipeline.
        """
        step = _Step(rows, factor, len(rows) * len(self._stages))
        self._expect(rows, backward=True)
        with self._engine.training_pass():
            for action in self._order.actions():
                self._act(action, step)
            self._links.flush()
        return sum(step.losses, torch.zeros((), device=rows[0].device))

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """Run forward passes in groups of microbatches; yield for each group its number of microbatches and their mean
        losses, which only the last stage's rank has. Collective over the pipeline."""
        # Enough to keep all stages busy, and few enough to fit into memory.
        together = 2 * self._schedule.stages
        with self._engine.forward_pass():
            for first in range(0, len(rows), together):
                group = rows[first : first + together]
                losses: list[Tensor] = []
                self._expect(group, backward=False)
                for chunk in range(len(self._stages)):
                    losses += [loss for one in group if (loss := self._forward(chunk, one).output).ndim == 0]
                self._links.flush()
                yield len(group), losses

    def close(self) -> None:
        """Stop the transport and release process groups."""
        self._links.close()
        self._order.close()

    def _expect(self, rows: Sequence[Tensor], backward: bool) -> None:
        for stage in self._stages:
            self._links.expect(stage.layout.stage, rows, backward)

    def _act(self, action: Action, step: _Step) -> None:
        chunk, key = action.chunk, (action.chunk, action.microbatch)
        match action.kind:
            case Kind.F:
                forwarded = step.forwarded[key] = self._forward(chunk, step.rows[action.microbatch])
                if forwarded.output.ndim == 0:
                    step.losses.append(forwarded.output.detach())
                step.forwards_left -= 1
            case Kind.B if self._schedule.splits_backward:
                step.deferred[key] = self._backward_inputs(chunk, step.forwarded.pop(key), step.factor)
            case Kind.B if self._hands_back_first(chunk, step):
                deferred = self._backward_inputs(chunk, step.forwarded.pop(key), step.factor)
                self._backward_weights(chunk, deferred, step)
            case Kind.B:
                forwarded = step.forwarded.pop(key)
                run = partial(self._backward, chunk, forwarded, step.factor)
                self._engine.backward(run, self._backward_passes(chunk, step))
                self._send_input_gradient(chunk, forwarded)
            case Kind.W:
                self._backward_weights(chunk, step.deferred.pop(key), step)

    def _hands_back_first(self, chunk: int, step: _Step) -> bool:
        """Return whether the next backward pass sends the gradient of its inputs before it computes those of the
        weights."""
        layout = self._stages[chunk].layout
        if not self._schedule.hands_back or layout.opens or self._links.is_local(layout.stage - 1):
            return False
        return hands_back_first(step.forwards_left, len(step.forwarded), self._order.most_live)

    def _forward(self, chunk: int, rows: Tensor) -> _Forwarded:
        stage, layout = self._stages[chunk], self._stages[chunk].layout
        self._links.activity.moving()
        if layout.opens:
            given = rows[:, :-1]
        else:
            given = self._links.receive(Channel(layout.stage - 1, layout.stage))
            given.requires_grad_(torch.is_grad_enabled())
        output = stage.forward(given, rows[:, 1:] if layout.closes else None)
        if not layout.closes:
            self._links.send(Channel(layout.stage, layout.stage + 1), output.detach())
        return _Forwarded(given, output)

    def _backward(self, chunk: int, forwarded: _Forwarded, factor: float) -> None:
        layout = self._stages[chunk].layout
        if layout.closes:
            (forwarded.output * factor).backward()
        else:
            forwarded.output.backward(self._links.receive(Channel(layout.stage + 1, layout.stage)))

    def _backward_inputs(self, chunk: int, forwarded: _Forwarded, factor: float) -> _Deferred:
        """Run the backward pass of the inputs alone, and send their gradient."""
        run = partial(self._backward, chunk, forwarded, factor)
        with self._weight_gradients.collecting() as products:
            received = self._engine.backward_inputs(run, self._stages[chunk].layout.units)
        self._send_input_gradient(chunk, forwarded)
        return _Deferred(received, products)

    def _backward_weights(self, chunk: int, deferred: _Deferred, step: _Step) -> None:
        products = self._products(deferred.products)
        self._engine.backward_weights(deferred.received, products, self._backward_passes(chunk, step))

    def _products(self, pending: PendingProducts) -> Iterator[Received]:
        """Compute weight gradients one after another, and let pending sends progress in between."""
        for parameter, gradient in gradients(pending):
            self._links.progress()
            yield parameter, gradient

    def _send_input_gradient(self, chunk: int, forwarded: _Forwarded) -> None:
        layout = self._stages[chunk].layout
        if not layout.opens:
            assert forwarded.input.grad is not None
            self._links.send(Channel(layout.stage, layout.stage - 1), forwarded.input.grad)

    def _backward_passes(self, chunk: int, step: _Step) -> list[BackwardPass]:
        """Count and return a chunk's next backward pass through each of its units."""
        layout, found = self._stages[chunk].layout, []
        for name in layout.units:
            step.backwards_done[name] += 1
            done, all_passes = step.backwards_done[name], len(step.rows) * self._passes[name]
            # A tied head uses the token matrix of the embedding alone.
            leading = name == "embedding" and not layout.opens
            found.append(BackwardPass(name, done == 1, done == all_passes, leading))
        return found
