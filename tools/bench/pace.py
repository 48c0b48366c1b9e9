"""Blocks that take longer than they compute, as if they ran on a processor of each rank's own."""

import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from llmtrain.model.gpt import GPT
from llmtrain.sharding.gradients import BackwardPass
from llmtrain.training.run import Run
from torch import Tensor


class Pace(torch.autograd.Function):
    """The identity, which waits as if a block were computed elsewhere meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, later: Callable[[], bool]) -> Tensor:
        """Wait `seconds`. later: whether in the backward pass the weights wait apart."""
        ctx.seconds, ctx.later = seconds, later
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Wait as long for the gradient of the inputs, and again for that of the weights."""
        time.sleep(ctx.seconds if ctx.later() else 2 * ctx.seconds)
        return gradient, None, None


def pace(model: GPT, seconds: float, later: Callable[[], bool]) -> None:
    """Have each block take so many seconds more in its forward pass, in the backward pass of its inputs and in that of
    its weights. later: whether the latter come apart, in `backward_weights`."""
    for block in model.blocks.values():
        block.register_forward_hook(lambda _, given, x: Pace.apply(x, seconds, later))


def pace_run(run: Run, seconds: float) -> None:
    """Have each block of a pipelined run of ours take so many seconds more in each of the three, the weights' where
    they come apart too."""
    if not seconds:
        return
    deferred, inner = run.executor._weight_gradients, run.engine.backward_weights
    pace(run.model, seconds, lambda: deferred.active)

    def paced(received: Any, products: Any, backward_passes: Collection[BackwardPass]) -> None:
        time.sleep(seconds * sum(turn.name.startswith("blocks.") for turn in backward_passes))
        inner(received, products, backward_passes)

    run.engine.backward_weights = paced  # type: ignore[method-assign]
