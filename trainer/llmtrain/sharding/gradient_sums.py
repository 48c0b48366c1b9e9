"""Sums of a unit's gradients over backward passes."""

from collections.abc import Callable
from typing import Protocol

from llmtrain_kernels.accumulate.kept import kept
from llmtrain_kernels.accumulate.op import accumulate
from llmtrain_kernels.triton_launch import takes_triton
from torch import Tensor, nn

from llmtrain.plan.program.instructions import BackwardPass
from llmtrain.sharding.unit import ShardedUnit

# A parameter and its gradient of one backward pass.
Received = tuple[nn.Parameter, Tensor]

Take = Callable[[nn.Parameter, Tensor], object]


class GradientSum(Protocol):
    """Sums the gradients of one unit's parameters. buffered: whether each pass has a buffer. missing: gradients that
    the current pass still lacks. by_autograd: whether autograd adds this pass's gradients to the sum by itself."""

    buffered: bool
    missing: int
    by_autograd: bool

    def start(self, backward_pass: BackwardPass, passing: bool) -> bool:
        """Begin a backward pass; return whether autograd has to report each gradient. passing: whether autograd runs
        the pass now and computes all its gradients."""

    def release(self) -> None:
        """Let autograd no longer add to the sum by itself."""

    def add(self, index: int, gradient: Tensor) -> None:
        """Add the gradient of the unit's parameter `index`, of its shape and in the compute dtype; a GPU keeps small
        ones until `flush`."""

    def flush(self) -> None:
        """Add all gradients that are kept. Called when the pass's gradients are complete."""

    def take(self) -> Tensor:
        """Return the gradients of the full unit, `[padded]`: of the pass, in the compute dtype, or of a run of passes,
        in a buffer that the caller then owns; or the unit's gradient."""


class Kept:
    """Small gradients of a unit that wait for the last one, so that one kernel adds them all."""

    def __init__(self, unit: ShardedUnit) -> None:
        self._starts, self._gradients = unit.parameters.starts, dict[int, Tensor]()

    def add(self, flat: Tensor, index: int, gradient: Tensor, overwrite: bool) -> None:
        """Keep a small gradient of the unit's parameter `index`, in the compute dtype, on a GPU; else add it to `flat`,
        `[padded]`, or replace what is there."""
        if takes_triton(flat) and kept(gradient.numel()):
            self._gradients[index] = gradient
        else:
            accumulate(flat, self._starts[index : index + 1], [gradient], overwrite)

    def flush(self, flat: Tensor, overwrite: bool) -> None:
        """Add what is kept to `flat`, `[padded]` of the compute dtype or fp32, or replace what is there."""
        found, self._gradients = dict(sorted(self._gradients.items())), {}
        if found:
            accumulate(flat, [self._starts[index] for index in found], [*found.values()], overwrite)


class UnshardedSum:
    """Sums into the unit's gradient, which is not sharded."""

    buffered = False

    def __init__(self, unit: ShardedUnit) -> None:
        self._unit, self._views, self._kept = unit, unit.parameters.views(unit.gradient), Kept(unit)
        # Autograd can add gradients to a sum of their dtype by itself; a hook would take 5 us per parameter. Weights
        # that are offloaded are dropped when their gradients are complete, which the hooks report.
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

    def release(self) -> None:
        """See GradientSum."""
        self.by_autograd = False
        _clear(self._unit)

    def add(self, index: int, gradient: Tensor) -> None:
        """See GradientSum."""
        self._kept.add(self._unit.gradient, index, gradient, self._overwrites)

    def flush(self) -> None:
        """See GradientSum."""
        self._kept.flush(self._unit.gradient, self._overwrites)

    def take(self) -> Tensor:
        """See GradientSum."""
        return self._unit.gradient


class BufferedSum:
    """Sums the gradients of a run of passes, or of one pass, in a buffer, which is then reduced into the unit's
    gradient shard."""

    buffered = True

    def __init__(self, unit: ShardedUnit, new_buffer: Callable[[], Tensor]) -> None:
        """new_buffer: waits for and returns a buffer, `[padded]`."""
        self._unit, self._new_buffer, self._kept = unit, new_buffer, Kept(unit)
        # Before the first gradient.
        self._none = self._buffer = unit.weight.new_empty(0)
        self._leading, self._overwrites = False, True
        self.missing, self.by_autograd = 0, False

    def start(self, backward_pass: BackwardPass, passing: bool) -> bool:
        """See GradientSum."""
        self._leading, self.missing = backward_pass.leading, _gradients(backward_pass, self._unit)
        self._overwrites = backward_pass.begins_run
        _clear(self._unit)
        return True

    def release(self) -> None:
        """See GradientSum."""
        _clear(self._unit)

    def add(self, index: int, gradient: Tensor) -> None:
        """See GradientSum."""
        if not len(self._buffer):
            self._buffer = self._open()
        self._kept.add(self._buffer, index, gradient, self._overwrites)

    def flush(self) -> None:
        """See GradientSum."""
        self._kept.flush(self._buffer, self._overwrites)

    def take(self) -> Tensor:
        """See GradientSum."""
        buffer, self._buffer = self._buffer, self._none
        return buffer

    def _open(self) -> Tensor:
        buffer = self._new_buffer()
        # What gets no gradient.
        own = self._unit.parameters.ends[0 if self._leading else -1]
        buffer[own:].zero_()
        return buffer


def _clear(unit: ShardedUnit) -> None:
    for parameter in unit.parameters.tensors:
        parameter.grad = None


def _gradients(backward_pass: BackwardPass, unit: ShardedUnit) -> int:
    """Return the number of parameters that a pass computes a gradient of."""
    return 1 if backward_pass.leading else len(unit.parameters)
