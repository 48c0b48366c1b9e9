"""Gradients of weights that wait until the gradients of inputs have gone on (Qi et al. 2024, section 2)."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Begins what a product waits for, if anything, and returns what computes it.
Begin = Callable[[], Callable[[], Tensor]]
PendingProducts = deque[tuple[nn.Parameter, Begin]]


class WeightGradientQueue:
    """Where layers leave the products that make gradients of weights, while a backward pass collects them."""

    def __init__(self) -> None:
        self._pending: PendingProducts | None = None

    @property
    def active(self) -> bool:
        """Whether products are to be left."""
        return self._pending is not None

    @contextmanager
    def collecting(self) -> Iterator[PendingProducts]:
        """Surround one microbatch's backward pass; yields what it leaves."""
        self._pending = deque()
        try:
            yield self._pending
        finally:
            self._pending = None

    def push(self, parameter: nn.Parameter, begin: Begin) -> None:
        """Leave the product that makes the gradient of `parameter`. begin: holds no weights, but their nn.Parameter."""
        assert self._pending is not None
        self._pending.append((parameter, begin))


def gradients(pending: PendingProducts) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter with its gradient, in the compute dtype, and forget what that took.

    What a product waits for begins to come before the product ahead of it is computed.
    """
    begun: deque[tuple[nn.Parameter, Callable[[], Tensor]]] = deque()
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
