"""Runs a pipeline's actions: each rank computes its stages of the model and sends the results to the next ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from llmtrain.comm.messages import Channel
from llmtrain.parallel.pipeline.action_order import ActionOrder
from llmtrain.parallel.pipeline.stage import Stage
from llmtrain.parallel.pipeline.stage_links import StageLinks
from llmtrain.parallel.weight_gradients import (
    PendingWeightGradients,
    WeightGradientQueue,
    input_gradients,
    weight_gradients,
)
from llmtrain.plan.pipeline.actions import Action, Kind, Schedule, hands_back_first
from llmtrain.sharding.engine import Engine


class _Seed(torch.autograd.Function):
    """A scalar from which the backward pass of a stage's output begins. torch.autograd.backward also takes the gradient
    of an output, but imports sympy for it, which is 32 MiB."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, received: list[Tensor]) -> Tensor:
        """Return a scalar 0. received: will hold the output's gradient."""
        ctx.received = received
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, scalar: Tensor) -> tuple[Tensor, None]:
        """Return the output's gradient."""
        return ctx.received.pop(), None


@dataclass(frozen=True)
class _Forwarded:
    """What a forward pass keeps for its backward pass. result: the loss; of other stages than the last, the place in
    autograd's graph where the gradient in `received` enters, so that the output itself can be freed."""

    input: Tensor
    result: Tensor | GradientEdge
    received: list[Tensor]


@dataclass
class _Step:
    """The state of one optimizer step.

    rows: its microbatches, int64 `[sequences, tokens + 1]`. factor: multiplies each mean loss in the backward pass.
    forwards_left: forward passes still to run. forwarded, pending: by (chunk, microbatch).
    """

    rows: Sequence[Tensor]
    factor: float
    forwards_left: int
    forwarded: dict[tuple[int, int], _Forwarded] = field(default_factory=dict)
    pending: dict[tuple[int, int], PendingWeightGradients] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)


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

    def train(self, rows: Sequence[Tensor], factor: float) -> Tensor:
        """Run forward and backward passes of all microbatches; return the sum of their mean losses, a scalar, which
        is 0 on ranks without the last stage.

        rows: the tokens of each microbatch, int64 `[sequences, tokens + 1]`. factor: multiplies each mean loss in the
        backward pass. Collective over the pipeline.
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
        losses, fp32 scalars, which only the last stage's rank has. rows: as in `train`. Collective over the
        pipeline."""
        together = self._schedule.evaluated_together
        groups = [range(first, min(first + together, len(rows))) for first in range(0, len(rows), together)]
        with self._engine.evaluation([len(group) for group in groups]):
            for group in groups:
                losses: list[Tensor] = []
                self._expect([rows[index] for index in group], backward=False)
                for chunk in range(len(self._stages)):
                    for index in group:
                        _, output = self._forward(Action(index, chunk, Kind.F), rows[index])
                        losses += [output] if self._stages[chunk].layout.closes else []
                self._links.flush()
                yield len(group), losses

    @property
    def message_bytes(self) -> int:
        """Bytes of the buffers that messages to other stages go through."""
        return self._links.nbytes

    @property
    def posted_bytes(self) -> int:
        """Most bytes so far of receives that were posted and not taken."""
        return self._links.posted_bytes

    def close(self) -> None:
        """Stop the transport and release process groups."""
        self._links.close()
        self._order.close()

    def _expect(self, rows: Sequence[Tensor], backward: bool) -> None:
        for stage in self._stages:
            self._links.expect(stage.layout.stage, rows, backward)

    def _act(self, action: Action, step: _Step) -> None:
        key = (action.chunk, action.microbatch)
        match action.kind:
            case Kind.F:
                given, output = self._forward(action, step.rows[action.microbatch])
                closes = self._stages[action.chunk].layout.closes
                received = list[Tensor]()
                result = output if closes else get_gradient_edge(_Seed.apply(output, received))
                step.forwarded[key] = _Forwarded(given, result, received)
                if closes:
                    step.losses.append(output.detach())
                step.forwards_left -= 1
                self._links.activity.moving(1 - step.forwards_left / (len(step.rows) * len(self._stages)))
            case Kind.B if self._schedule.splits_backward:
                step.pending[key] = self._backward_inputs(action, step.forwarded.pop(key), step.factor)
            case Kind.B if self._hands_back_first(action.chunk, step):
                pending = self._backward_inputs(action, step.forwarded.pop(key), step.factor)
                weight_gradients(self._engine, action, pending, self._links.progress)
            case Kind.B:
                forwarded = step.forwarded.pop(key)
                self._engine.backward(action, partial(self._backward, action.chunk, forwarded, step.factor))
                self._send_input_gradient(action.chunk, forwarded)
            case Kind.W:
                weight_gradients(self._engine, action, step.pending.pop(key), self._links.progress)

    def _hands_back_first(self, chunk: int, step: _Step) -> bool:
        """Return whether the next backward pass sends the gradient of its inputs before it computes those of the
        weights."""
        layout = self._stages[chunk].layout
        if not self._schedule.hands_back or layout.opens or self._links.is_local(layout.stage - 1):
            return False
        return hands_back_first(step.forwards_left, len(step.forwarded), self._order.most_live)

    def _forward(self, action: Action, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Run a forward pass; return the input and the output of the stage."""
        stage, layout = self._stages[action.chunk], self._stages[action.chunk].layout
        self._links.activity.moving()
        if layout.opens:
            given = rows[:, :-1]
        else:
            given = self._links.receive(Channel(layout.stage - 1, layout.stage))
            given.requires_grad_(torch.is_grad_enabled())
        targets = rows[:, 1:] if layout.closes else None
        output = self._engine.forward(action, partial(stage.forward, given, targets))
        if not layout.closes:
            self._links.send(Channel(layout.stage, layout.stage + 1), output.detach())
        return given, output

    def _backward(self, chunk: int, forwarded: _Forwarded, factor: float) -> None:
        layout = self._stages[chunk].layout
        if isinstance(forwarded.result, Tensor):
            (forwarded.result * factor).backward()
        else:
            forwarded.received.append(self._links.receive(Channel(layout.stage + 1, layout.stage)))
            torch.autograd.backward(forwarded.result)

    def _backward_inputs(self, action: Action, forwarded: _Forwarded, factor: float) -> PendingWeightGradients:
        """Run the backward pass of the inputs alone, and send their gradient."""
        run = partial(self._backward, action.chunk, forwarded, factor)
        units = self._stages[action.chunk].layout.units
        pending = input_gradients(self._weight_gradients, self._engine, action, run, units)
        self._send_input_gradient(action.chunk, forwarded)
        return pending

    def _send_input_gradient(self, chunk: int, forwarded: _Forwarded) -> None:
        layout = self._stages[chunk].layout
        if not layout.opens:
            assert forwarded.input.grad is not None
            self._links.send(Channel(layout.stage, layout.stage - 1), forwarded.input.grad)
