"""Emulates a separate processor for each rank. Its work takes a given time, independent of the rank's computation."""

from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any

import torch
from llmtrain.comm.messages import Channel
from llmtrain.parallel.pipeline.stage_links import channels
from llmtrain.plan.pipeline.actions import Action
from llmtrain.training.run import Run
from torch import Tensor

# Usual lateness of a sleep in seconds.
PROMPT = 5e-4


class Processor:
    """Works without a pause, like an accelerator with a queue of launched kernels. The host's own work takes none of
    the processor's time, because `work` sleeps less for it, unless the host is late. Work that needs a message begins
    when the host has the message."""

    def __init__(self, arrived: Callable[[], set[Channel]]) -> None:
        """arrived: returns the channels whose next message has arrived."""
        self._arrived, self._free, self._there = arrived, 0.0, set[Channel]()

    def begin(self) -> None:
        """Start working now, after a pause."""
        self._free, self._there = perf_counter(), set()

    def work(self, seconds: float) -> None:
        """Return when `seconds` of work are done, counted from the end of the previous work."""
        self._free += seconds
        sleep(max(0.0, self._free - perf_counter()))
        late = perf_counter() - self._free
        # A sleep that ends only a little late does not delay the next work.
        if late > PROMPT:
            self._free += late
        self._there = self._arrived()

    def receive(self, channel: Channel, receive: Callable[[Channel], Tensor]) -> Tensor:
        """Receive the next message of a channel, for the next work."""
        values = receive(channel)
        if channel not in self._there:
            self._free = max(self._free, perf_counter())
        self._there.discard(channel)
        return values


class BlockInput(torch.autograd.Function):
    """The identity on a block's input. Its backward pass runs right after the block's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, worked: Callable[[], None]) -> Tensor:
        """worked: called when the gradient is ready."""
        ctx.worked = worked
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Pass on the gradient."""
        ctx.worked()
        return gradient, None


def emulate(run: Run, seconds: float) -> None:
    """Make each block of a pipelined run take `seconds` in its forward pass, in the backward pass of its inputs and in
    that of its weights, whether these two are separate or not."""
    executor, engine = run.executor, run.engine
    transport, deferred, train, weights = (
        executor._links._transport,
        executor._weight_gradients,
        executor.train,
        engine.backward_weights,
    )
    own = {chunk.layout.stage for chunk in executor._stages}
    ours = [channel for channel in channels(executor._schedule) if channel.target in own]
    processor, receive = (
        Processor(lambda: {channel for channel in ours if transport.arrived(channel)}),
        transport.receive,
    )

    def backward() -> None:
        processor.work(seconds if deferred.active else 2 * seconds)

    def wait_forward(*_: Any) -> None:
        processor.work(seconds)

    def wait_backward(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return BlockInput.apply(given[0], backward), *given[1:]

    def backward_weights(action: Action, gradients: Any) -> None:
        weights(action, gradients)
        layout = executor._stages[action.chunk].layout
        processor.work(seconds * (layout.end - layout.first))

    def passes(*given: Any) -> Tensor:
        processor.begin()
        return train(*given)

    for block in run.model.blocks.values():
        block.register_forward_pre_hook(wait_backward)
        block.register_forward_hook(wait_forward)
    transport.receive = lambda channel: processor.receive(channel, receive)  # type: ignore[method-assign]
    engine.backward_weights = backward_weights  # type: ignore[method-assign]
    executor.train = passes  # type: ignore[method-assign, assignment]
