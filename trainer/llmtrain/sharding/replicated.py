"""Plain data parallelism: every rank holds all model states, and gradients are all-reduced unit by unit while the
backward pass of earlier units still runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmtrain.sharding.flat import FlatUnit

CountBytes = Callable[[str, str, int], None]


@dataclass
class GradientSync:
    """Sums the units' gradients over microbatches and data-parallel ranks.

    group: the data-parallel group, or None for one rank alone. count: told (group, operation, bytes) at each call.
    """

    units: Sequence[FlatUnit]
    group: dist.ProcessGroup | None
    count: CountBytes
    _first: bool = True
    _reducing: bool = False
    _missing: dict[str, int] = field(default_factory=dict)
    _works: list[dist.Work] = field(default_factory=list)

    def __post_init__(self) -> None:
        for unit in self.units:
            for parameter, into in zip(unit.parameters, unit.gradient_views, strict=True):
                parameter.register_post_accumulate_grad_hook(self._hook(unit, into))

    @contextmanager
    def backward(self, first: bool, last: bool) -> Iterator[None]:
        """Surround one microbatch's forward and backward.

        The step's `first` one replaces what the gradients held, the `last` one starts the all-reduces.
        """
        self._first, self._reducing = first, last and self.group is not None
        self._missing = {unit.spec.name: len(unit.parameters) for unit in self.units}
        yield
        if any(self._missing.values()):
            raise RuntimeError(f"parameters without a gradient, by unit: {self._missing}")
        for work in self._works:
            work.wait()
        self._works.clear()

    def norm(self) -> Tensor:
        """Return the global L2 norm of the gradients, an fp32 scalar, the same on every rank."""
        return torch.stack([torch.linalg.vector_norm(unit.gradient) for unit in self.units]).norm()

    def _hook(self, unit: FlatUnit, into: Tensor) -> Callable[[nn.Parameter], None]:
        def accumulated(parameter: nn.Parameter) -> None:
            # Autograd hands over a gradient of the compute dtype; microbatches are summed in fp32.
            assert parameter.grad is not None
            if self._first:
                into.copy_(parameter.grad)
            else:
                into.add_(parameter.grad)
            parameter.grad = None
            self._missing[unit.spec.name] -= 1
            if self._reducing and self._missing[unit.spec.name] == 0:
                self._reduce(unit)

        return accumulated

    def _reduce(self, unit: FlatUnit) -> None:
        self.count("data", "all_reduce", unit.gradient.nbytes)
        work = dist.all_reduce(unit.gradient, group=self.group, async_op=True)
        assert work is not None
        self._works.append(work)
