"""Gradients of weights that wait until the gradients of inputs have gone on (Qi et al. 2024, section 2)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

Product = Callable[[], Tensor]


@dataclass
class Left:
    """What one backward pass left to be computed: parameters, each with what computes its gradient."""

    products: list[tuple[nn.Parameter, Product]] = field(default_factory=list)

    def results(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with its gradient, and forget what it took."""
        while self.products:
            parameter, product = self.products.pop(0)
            yield parameter, product()


@dataclass
class Deferred:
    """Where layers leave the products that make gradients of weights, while a backward pass collects them."""

    left: Left | None = None

    @contextmanager
    def collecting(self) -> Iterator[Left]:
        """Collect what layers leave inside."""
        self.left = Left()
        yield self.left
        self.left = None

    @property
    def active(self) -> bool:
        """Whether products are to be left."""
        return self.left is not None

    def push(self, parameter: nn.Parameter, product: Product) -> None:
        """Leave the product that makes the gradient of `parameter`."""
        assert self.left is not None
        self.left.products.append((parameter, product))
