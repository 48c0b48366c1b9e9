"""The optimizer states of one unit on this rank, and all access to them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from llmtrain_kernels.adamw.op import Decay, adamw
from llmtrain_kernels.adamw.step import AdamWStep
from torch import Tensor

from llmtrain.comm.device import to_device
from llmtrain.comm.waits import Ticket
from llmtrain.model.tensors import UnitSpec

ElementRange = tuple[int, int]
StepRange = Callable[[ElementRange, Tensor], Ticket | None]
"""Steps a range with its gradient. Returns a ticket of what is not done yet and reads the gradient; None if all is
done."""

# Names of the states, as checkpoints have them.
STATES = ("master", "m", "v")


class Masters(Protocol):
    """Where the fp32 masters are. names: the states that have memory of their own. in_weights: whether the masters are
    the weights."""

    names: Sequence[str]
    in_weights: bool

    def by_name(self, states: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """Return all states by name. states: fp32 `[states, n]`, those of `names`. weight: `[n]`."""

    def rounded(self, weight: Tensor) -> Tensor | None:
        """Return what a kernel rounds the new masters into; None if it writes the weights as masters."""


class SeparateMasters:
    """Masters with memory of their own, which each step rounds into the weights."""

    names: Sequence[str] = STATES
    in_weights = False

    def by_name(self, states: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """See Masters."""
        return dict(zip(STATES, states.unbind(), strict=True))

    def rounded(self, weight: Tensor) -> Tensor | None:
        """See Masters."""
        return weight


class WeightsAreMasters:
    """Masters that are the weights themselves, which are fp32."""

    names: Sequence[str] = STATES[1:]
    in_weights = True

    def by_name(self, states: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """See Masters."""
        return {"master": weight, **dict(zip(self.names, states.unbind(), strict=True))}

    def rounded(self, weight: Tensor) -> Tensor | None:
        """See Masters."""
        return None


class StepRule:
    """How ranges of one unit are stepped, wherever their states are. end: number of elements of the unit, with padding.
    backend: the kernel."""

    def __init__(self, spec: UnitSpec, end: int, backend: str, masters: Masters) -> None:
        self.masters, self._backend, self._decay = masters, backend, _decay_ranges(spec, end)

    def step(
        self,
        states: Mapping[str, Tensor],
        within: ElementRange,
        gradient: Tensor,
        numbers: AdamWStep,
        weight: Tensor,
        into: Mapping[str, Tensor] | None = None,
        threads: int | None = None,
    ) -> None:
        """Step the range `within` of the unit. states: the states of its elements, by name, fp32 `[n]`. into: memory
        for the new states, which leaves the old ones as they are. threads: number of threads of the kernel on a CPU.
        See `OptimizerShard.step` for the rest."""
        master, m, v = (states[name] for name in STATES)
        after = None if into is None else (into["master"], into["m"], into["v"])
        came = to_device(gradient, master.device)
        decay = self._decay_within(*within)
        rounded = self.masters.rounded(weight)
        adamw(self._backend, master, m, v, came, numbers, rounded, after, threads, decay=decay)

    @property
    def changes_gradient(self) -> bool:
        """Whether a step may overwrite its gradient."""
        return self._backend in ("torch", "apex")

    def _decay_within(self, start: int, end: int) -> list[Decay]:
        clipped = ((max(first, start) - start, min(last, end) - start, decays) for first, last, decays in self._decay)
        return [part for part in clipped if part[0] < part[1]]


class OptimizerShard:
    """fp32 masters and AdamW's two moments of the elements `[start, end)` of a unit, on the device that computes.

    Methods take ranges of the unit's elements within `[start, end)`. Other code reaches the states by these methods, so
    another class can offload them; masters that are the weights lie in the unit's weight.
    """

    def __init__(
        self, rule: StepRule, bounds: ElementRange, masters: Tensor, read_late: bool = False, moments: bool = True
    ) -> None:
        """bounds: `[start, end)` with padding. masters: fp32 `[end - start]`; either the weights themselves or memory
        of their own, as the rule has it. read_late: whether a checkpoint reads the states while it is written. moments:
        whether there are any yet."""
        self.bounds, self._rule, self._late = bounds, rule, read_late
        self._states = {"master": masters}
        if moments:
            self._states |= {"m": torch.zeros_like(masters), "v": torch.zeros_like(masters)}

    def step_ahead(self, gradient: Tensor, weight: Tensor) -> None:
        """Do nothing: resident states are stepped when the norm is known."""

    def step(self, within: ElementRange, gradient: Tensor, numbers: AdamWStep, weight: Tensor) -> None:
        """Step a range with its gradient, `[n]`, fp32 or of the weights' dtype, which may change. Return None.

        numbers: its weight decay applies to the tensors that decay. weight: `[n]` of the compute dtype, which receives
        the rounded masters, or is the masters.
        """
        states = {name: self._at(name, *within) for name in STATES}
        self._rule.step(states, within, gradient, numbers, weight)

    def read(self, name: str, start: int, end: int) -> Tensor:
        """Return one of STATES, fp32 `[end - start]`, read-only and valid until the next step or write."""
        return self._at(name, start, end)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Set one of STATES, from `start`, to `values`: `[n]` of any float dtype on any device."""
        self._at(name, start, start + values.numel()).copy_(values)

    def use_masters(self, masters: Tensor) -> None:
        """Use `masters`, fp32 `[end - start]`, which already holds their values, as the masters."""
        self._states["master"] = masters

    @property
    def read_late(self) -> bool:
        """Whether a checkpoint reads the states while it is written, and copies none before."""
        return self._late

    @property
    def nbytes(self) -> int:
        """Bytes of the masters and of the moments."""
        return sum(state.nbytes for state in self._states.values())

    def _at(self, name: str, start: int, end: int) -> Tensor:
        return self._states[name][start - self.bounds[0] : end - self.bounds[0]]


class OptimizerStates(Protocol):
    """The optimizer states of one unit on this rank, wherever they rest. `OptimizerShard` describes the methods."""

    bounds: ElementRange

    def step_ahead(self, gradient: Tensor, weight: Tensor) -> None:
        """Start to step what may be stepped before the gradients' norm is known.

        gradient: `[end - start]`, as for `step`; it must be complete, and must not change until `step` or until the
        step is skipped. weight: as for `step`; only `step` changes it.
        """

    def step(self, within: ElementRange, gradient: Tensor, numbers: AdamWStep, weight: Tensor) -> Ticket | None:
        """Step a range with its gradient; arguments as for `OptimizerShard.step`. Return a ticket of the
        step, which reads the gradient and writes the weight until it is done; None if it is done already."""

    def read(self, name: str, start: int, end: int) -> Tensor:
        """See OptimizerShard."""

    def write(self, name: str, start: int, values: Tensor) -> None:
        """See OptimizerShard."""

    def use_masters(self, masters: Tensor) -> None:
        """See OptimizerShard."""

    @property
    def nbytes(self) -> int:
        """Bytes of the states, without masters that are weights."""

    @property
    def read_late(self) -> bool:
        """Whether a checkpoint reads the states while it is written, and copies none before."""


class StepsAhead(Protocol):
    """Steps states of a rank before the norm of the gradients is known, on threads of its own."""

    def begin(self, numbers: AdamWStep | None) -> None:
        """Begin a step. numbers: with which units are stepped ahead, those of a step that does not clip; None: none are
        stepped ahead."""

    def decide(self, numbers: AdamWStep | None) -> None:
        """End the passes. numbers: with which the units are stepped; None: the step is skipped. Steps ahead that had
        other numbers are discarded."""

    def finish(self) -> None:
        """Wait until all steps are done."""


class OptimizerStateRange:
    """The states of the elements `[start, end)` of an optimizer shard, as a checkpoint reads and writes them. names:
    those of the states."""

    def __init__(
        self, unit: UnitSpec, shard: OptimizerStates, start: int, end: int, names: tuple[str, ...] = STATES
    ) -> None:
        self.unit, self.start, self.end, self.names, self._shard = unit, start, end, names, shard

    @property
    def read_late(self) -> bool:
        """Whether a checkpoint reads the states while it is written, and copies none before."""
        return self._shard.read_late

    def read(self, name: str, first: int, last: int) -> Tensor:
        """Return the elements `[first, last)` of the unit of a state, fp32: as they are until the next step."""
        return self._shard.read(name, first, last)

    def write(self, name: str, offset: int, values: Tensor) -> None:
        """Set a state from `start + offset` on to `values`, `[n]` of any float dtype."""
        self._shard.write(name, self.start + offset, values)


def _decay_ranges(spec: UnitSpec, end: int) -> list[tuple[int, int, bool]]:
    """Return the unit's decay ranges with padding up to `end`, to which no decay applies."""
    found = spec.decay_ranges
    start = found.pop()[0] if not found[-1][2] else spec.numel
    return [*found, (start, max(end, spec.numel), False)]
