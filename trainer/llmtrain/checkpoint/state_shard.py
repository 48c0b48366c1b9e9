"""The states in memory that a checkpoint saves and loads: ranges of flat units."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from llmtrain.model.tensors import UnitSpec


class StateRange(Protocol):
    """The range `[start, end)` of one unit: a save reads its states, a load writes them."""

    @property
    def unit(self) -> UnitSpec:
        """The unit."""

    @property
    def start(self) -> int:
        """The first element of the unit."""

    @property
    def end(self) -> int:
        """The element behind the last one."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the states: `master`, `m`, `v`."""

    def read(self, name: str) -> Tensor:
        """Return a state, fp32 `[end - start]`: as it is until the states change."""

    def write(self, name: str, offset: int, values: Tensor) -> None:
        """Set a state from `start + offset` on."""


@dataclass(frozen=True)
class StateShard:
    """A StateRange in memory. states: by name, fp32 `[end - start]`; `write` changes them in place."""

    unit: UnitSpec
    start: int
    end: int
    states: dict[str, Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        """See StateRange."""
        return tuple(self.states)

    def read(self, name: str) -> Tensor:
        """See StateRange."""
        return self.states[name]

    def write(self, name: str, offset: int, values: Tensor) -> None:
        """See StateRange."""
        self.states[name][offset : offset + values.numel()].copy_(values)
