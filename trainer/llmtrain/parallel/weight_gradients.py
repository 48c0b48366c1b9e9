"""Deferred weight gradients: a layer's weights may get their gradients later than its inputs.

The backward pass of a linear layer makes two products. The gradient of its input is needed by the layer before, and at
the start of a stage by another rank. The gradient of its weight is needed only by the optimizer. Zero-bubble schedules
run the second product as an action of its own, where a rank would otherwise wait (Qi et al. 2024, section 2). Other
schedules run both in one action, but may send the gradient of the stage's input in between (`hands_back_first`).

1. Layers push the products of their weights' gradients to a `WeightGradientQueue` while it collects, and compute them
   immediately while it does not. `SplitBackwardLinear` does so for plain layers, `parallel.tensor.layers` for those
   that tensor parallelism shards. Norms, the embedding and the head always get their gradients from autograd.
2. `input_gradients` runs the backward pass of the inputs. It holds the weight gradients that autograd computes anyway,
   and the products of the others.
3. `weight_gradients` runs the backward pass of the weights: the engine adds both to the sums of microbatches, unit by
   unit. Each product is computed when the engine asks for it, so that few whole gradients exist at a time.

In between, a product keeps the layer's input and the gradient of its output, and no weights: the engine may free them.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from llmtrain_kernels.matmul import Product, linear
from torch import Tensor, nn

from llmtrain.model.layers import InputMajorLinear, Linear
from llmtrain.plan.pipeline.actions import Action
from llmtrain.sharding.engine import Engine
from llmtrain.sharding.gradient_sums import Received

Begin = Callable[[], Product]
"""Starts the communication that a product needs, if any, and returns the product."""

PendingProducts = deque[tuple[nn.Parameter, Begin]]


@dataclass(frozen=True)
class PendingWeightGradients:
    """A microbatch's weight gradients between the backward pass of its inputs and that of its weights. received: those
    that autograd has computed. products: of the others."""

    received: list[Received]
    products: PendingProducts

    def by_unit(self, unit_of: Callable[[nn.Parameter], str], between: Callable[[], object]) -> Iterator[Received]:
        """Compute what is left, and yield all gradients; those of a unit are consecutive. between: called after each
        product."""
        received: dict[str, list[Received]] = {}
        for parameter, gradient in self.received:
            received.setdefault(unit_of(parameter), []).append((parameter, gradient))
        # First the units of which all gradients are there, as their reduction can start.
        deferred = {unit_of(parameter) for parameter, _ in self.products}
        for name in [name for name in received if name not in deferred]:
            yield from received.pop(name)
        for parameter, gradient in gradients(self.products):
            between()
            # Finish one unit before the next: there are only few buffers.
            yield from received.pop(unit_of(parameter), [])
            yield parameter, gradient


class WeightGradientQueue:
    """Collects the products of weight gradients during a microbatch's backward pass."""

    def __init__(self) -> None:
        self._pending: PendingProducts | None = None

    @property
    def active(self) -> bool:
        """Whether the queue collects products."""
        return self._pending is not None

    @contextmanager
    def collecting(self) -> Iterator[PendingProducts]:
        """Collect the products of one microbatch's backward pass into what this yields."""
        self._pending = deque()
        try:
            yield self._pending
        finally:
            self._pending = None

    def push(self, parameter: nn.Parameter, begin: Begin) -> None:
        """Add the product of the gradient of `parameter`. begin: refers to weights only as `nn.Parameter`s."""
        assert self._pending is not None
        self._pending.append((parameter, begin))

    def begin(self, parameter: nn.Parameter, begin: Begin) -> Callable[[], Tensor | None]:
        """Begin the product that is the gradient of `parameter`, of the parameter's shape and dtype, and return it;
        while the queue collects, push it and return a function that returns None."""
        if not self.active:
            return begin()
        self.push(parameter, begin)
        return lambda: None


def input_gradients(
    queue: WeightGradientQueue, engine: Engine, action: Action, run: Callable[[], None], units: Collection[str]
) -> PendingWeightGradients:
    """Run an action's backward pass of the inputs now, and hold its weight gradients. run: computes it. units: those
    that it uses, whose layers defer to `queue`."""
    received: list[Received] = []
    with queue.collecting() as products:
        engine.backward_inputs(action, run, units, lambda *gradient: received.append(gradient))
    return PendingWeightGradients(received, products)


def weight_gradients(
    engine: Engine, action: Action, pending: PendingWeightGradients, between: Callable[[], object]
) -> None:
    """Run an action's backward pass of the weights, later. between: called after each product."""
    engine.backward_weights(action, pending.by_unit(engine.unit_of, between))


def gradients(pending: PendingProducts) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Compute and yield each parameter's gradient, of its shape and in the compute dtype, and free what its product
    kept.

    Each product's communication starts before the product ahead of it is computed.
    """
    begun: deque[tuple[nn.Parameter, Product]] = deque()
    with torch.no_grad():
        while pending or begun:
            if pending:
                parameter, begin = pending.popleft()
                begun.append((parameter, begin()))
                del begin
            if len(begun) > 1 or not pending:
                parameter, product = begun.popleft()
                yield parameter, product()
                del product


class SplitBackwardLinear(nn.Module):
    """A plain linear layer whose weight gradients can be deferred. It takes over the layer's parameters."""

    def __init__(self, plain: Linear | InputMajorLinear, queue: WeightGradientQueue) -> None:
        super().__init__()
        self.weight, self.bias, self._queue = plain.weight, plain.bias, queue
        self._input_major = isinstance(plain, InputMajorLinear)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`, both of the weight's dtype."""
        return linear(x, self.weight.t() if self._input_major else self.weight, self.bias, self._defer)

    def _defer(self, for_weight: Product, for_bias: Product) -> bool:
        """Push the products if the queue collects, and return whether it does."""
        if not self._queue.active:
            return False
        self._queue.push(self.weight, lambda: (lambda: for_weight().t()) if self._input_major else for_weight)
        if self.bias is not None:
            self._queue.push(self.bias, lambda: for_bias)
        return True


def split_backward(blocks: nn.Module, queue: WeightGradientQueue) -> None:
    """Replace each Linear and InputMajorLinear, in place, with one that can defer its weight gradients to `queue`."""
    for module in list(blocks.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, Linear | InputMajorLinear):
                setattr(module, name, SplitBackwardLinear(layer, queue))
