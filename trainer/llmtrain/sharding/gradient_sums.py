"""Sums of a unit's gradients over backward passes."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from llmtrain.plan.program.instructions import BackwardPass
from llmtrain.sharding.unit import ShardedUnit

# A parameter and its gradient of one backward pass.
Received = tuple[nn.Parameter, Tensor]


class GradientSum(Protocol):
    """Sums the gradients of one unit's parameters. missing: gradients that the current pass still lacks. by_autograd:
    whether autograd adds this pass's gradients to the sum by itself."""

    missing: int
    by_autograd: bool

    def start(self, backward_pass: BackwardPass, passing: bool) -> bool:
        """Begin a backward pass; return whether autograd has to report each gradient. passing: whether autograd runs
        the pass now and computes all its gradients."""

    def add(self, place: int, gradient: Tensor) -> None:
        """Add the gradient of the parameter at `place`, in the compute dtype."""

    def take(self) -> Tensor | None:
        """Return the buffer with the pass's gradients of the whole unit, which the caller then owns; None if they are
        already in the unit's gradient."""


class WholeSum:
    """Sums into the unit's gradient, which is not sharded."""

    def __init__(self, unit: ShardedUnit) -> None:
        self._unit, self._views = unit, unit.parameters.views(unit.gradient)
        # Autograd can add gradients to a sum of their dtype by itself; a hook would take 5 us per parameter. Weights
        # that come from elsewhere leave when their gradients are complete, which the hooks report.
        self._leaves = unit.weight.dtype == unit.gradient.dtype and not unit.hops.placement.moves_weights
        self._overwrites = True
        self.missing, self.by_autograd = 0, False

    def start(self, backward_pass: BackwardPass, passing: bool) -> bool:
        """See GradientSum."""
        before, first, last = self.by_autograd, backward_pass.first, backward_pass.last
        self._overwrites = first
        self.by_autograd = self._leaves and passing and not (first and last)
        reports = last or not self.by_autograd
        self.missing = _gradients(backward_pass, self._unit) if reports else 0
        if first and (self.by_autograd or backward_pass.leading):
            self._unit.gradient.zero_()
        if first or not (self.by_autograd and before):
            for parameter, view in zip(self._unit.parameters.tensors, self._views, strict=True):
                parameter.grad = view if self.by_autograd else None
        return reports

    def add(self, place: int, gradient: Tensor) -> None:
        """See GradientSum."""
        if self._overwrites:
            self._views[place].copy_(gradient)
        else:
            self._views[place].add_(gradient)

    def take(self) -> Tensor | None:
        """See GradientSum."""
        return None


class BufferedSum:
    """Collects each pass's gradients in a buffer, which is then reduced into the unit's gradient shard."""

    def __init__(self, unit: ShardedUnit, new_buffer: Callable[[], Tensor]) -> None:
        """new_buffer: waits for and returns a buffer of the unit's padded elements."""
        self._unit, self._new_buffer = unit, new_buffer
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        self._leading = False
        self.missing, self.by_autograd = 0, False

    def start(self, backward_pass: BackwardPass, passing: bool) -> bool:
        """See GradientSum."""
        self._leading, self.missing = backward_pass.leading, _gradients(backward_pass, self._unit)
        for parameter in self._unit.parameters.tensors:
            parameter.grad = None
        return True

    def add(self, place: int, gradient: Tensor) -> None:
        """See GradientSum."""
        if self._buffer is None:
            self._open()
        self._views[place].copy_(gradient)

    def take(self) -> Tensor | None:
        """See GradientSum."""
        buffer, self._buffer, self._views = self._buffer, None, []
        return buffer

    def _open(self) -> None:
        self._buffer = buffer = self._new_buffer()
        buffer[self._unit.spec.numel :].zero_()
        self._views = self._unit.parameters.lasting_views(buffer)
        for view in self._views[1:] if self._leading else []:
            view.zero_()


def _gradients(backward_pass: BackwardPass, unit: ShardedUnit) -> int:
    """Return the number of parameters that a pass computes a gradient of."""
    return 1 if backward_pass.leading else len(unit.parameters)
