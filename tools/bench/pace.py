"""Blocks that sleep in addition to their computation, to emulate a separate processor for each rank."""

import time
from collections.abc import Callable
from typing import Any

import torch
from llmtrain.model.gpt import GPT
from llmtrain.plan.pipeline.actions import Action
from llmtrain.training.run import Run
from torch import Tensor


class Pace(torch.autograd.Function):
    """The identity; it sleeps, as if another processor computed a block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, later: Callable[[], bool]) -> Tensor:
        """Sleep `seconds`. later: whether the weights' backward pass sleeps separately."""
        ctx.seconds, ctx.later = seconds, later
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Sleep as long for the gradient of the inputs, and again for that of the weights."""
        time.sleep(ctx.seconds if ctx.later() else 2 * ctx.seconds)
        return gradient, None, None


def pace(model: GPT, seconds: float, later: Callable[[], bool]) -> None:
    """Add `seconds` to each block's forward pass, to the backward pass of its inputs and to that of its weights.
    later: whether the last one is separate, in `backward_weights`."""
    for block in model.blocks.values():
        block.register_forward_hook(lambda _, given, x: Pace.apply(x, seconds, later))


def pace_run(run: Run, seconds: float) -> None:
    """Apply `pace` to the blocks of a pipelined llmtrain run, with or without a separate backward pass of weights."""
    if not seconds:
        return
    deferred, inner = run.executor._weight_gradients, run.engine.backward_weights
    pace(run.model, seconds, lambda: deferred.active)

    def paced(action: Action, gradients: Any) -> None:
        layout = run.plan.stages_of(run.ranks.rank)[action.chunk]
        time.sleep(seconds * (layout.end - layout.first))
        inner(action, gradients)

    run.engine.backward_weights = paced  # type: ignore[method-assign]
