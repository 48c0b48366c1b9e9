"""The optimizer states of one unit on this rank, and all access to them."""

from dataclasses import replace

import torch
from llmtrain_kernels.adamw import AdamWStep, adamw
from torch import Tensor

from llmtrain.model.tensors import UnitSpec

Range = tuple[int, int]

# Names of the states, as checkpoints have them.
STATES = ("master", "m", "v")


class OptimizerShard:
    """fp32 masters and AdamW's two moments of the elements `[start, end)` of a unit, on the device that computes.

    Every range in the methods is one of elements of the unit and lies within `[start, end)`. Nothing else refers to the
    states as tensors, so that they can rest elsewhere.
    """

    def __init__(self, spec: UnitSpec, held: Range, masters: Tensor, backend: str) -> None:
        """held: `[start, end)`, padding included. masters: fp32 `[end - start]`; memory of their own, or the weights,
        which a step then changes. backend: the kernel that steps them."""
        self.held = held
        self._backend, self._decay = backend, _decay_ranges(spec, held[1])
        self._states = {"master": masters, "m": torch.zeros_like(masters), "v": torch.zeros_like(masters)}

    def step(self, within: Range, gradient: Tensor, numbers: AdamWStep) -> Tensor:
        """Step a range with its gradient, fp32 `[n]`, which may change too; return its fp32 weights, `[n]`.

        numbers: weight_decay applies where the unit's tensors decay.
        """
        for first, last, decays in self._decay:
            start, end = max(first, within[0]), min(last, within[1])
            if start < end:
                master, m, v = (self._at(name, start, end) for name in STATES)
                share = gradient[start - within[0] : end - within[0]]
                own = numbers if decays else replace(numbers, weight_decay=0.0)
                adamw(self._backend, master, m, v, share, own)
        return self._at("master", *within)

    def read(self, name: str, start: int, end: int) -> Tensor:
        """Return one of STATES, fp32 `[end - start]`: valid until the next step or write, and not to be written to."""
        return self._at(name, start, end)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Set one of STATES from `start` on to `values`, `[n]` of any float dtype on any device."""
        self._at(name, start, start + values.numel()).copy_(values)

    def use_masters(self, masters: Tensor) -> None:
        """Have the masters lie in `masters`, which holds their values already."""
        self._states["master"] = masters

    @property
    def nbytes(self) -> int:
        """Bytes of the masters and of the moments."""
        return sum(state.nbytes for state in self._states.values())

    def _at(self, name: str, start: int, end: int) -> Tensor:
        return self._states[name][start - self.held[0] : end - self.held[0]]


class OptimizerStateRange:
    """The states of the elements `[start, end)` of an optimizer shard, as a checkpoint reads and writes them."""

    names = STATES

    def __init__(self, unit: UnitSpec, shard: OptimizerShard, start: int, end: int) -> None:
        self.unit, self.start, self.end, self._shard = unit, start, end, shard

    def read(self, name: str) -> Tensor:
        """Return a state, fp32 `[end - start]`: as it is until the next step."""
        return self._shard.read(name, self.start, self.end)

    def write(self, name: str, offset: int, values: Tensor) -> None:
        """Set a state from `start + offset` on."""
        self._shard.write(name, self.start + offset, values)


def _decay_ranges(spec: UnitSpec, end: int) -> list[tuple[int, int, bool]]:
    """Return the unit's decay ranges with padding up to `end`, to which no decay applies."""
    found = spec.decay_ranges
    start = found.pop()[0] if not found[-1][2] else spec.numel
    return [*found, (start, max(end, spec.numel), False)]
