"""The states in memory that a checkpoint saves and loads: ranges of flat units."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from llmtrain.checkpoint.safetensors_file import bytes_of
from llmtrain.comm.device import to_host
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

    @property
    def read_late(self) -> bool:
        """Whether a checkpoint reads the states while it is written, and copies none before."""

    def read(self, name: str, first: int, last: int) -> Tensor:
        """Return the elements `[first, last)` of the unit, fp32, of a state: as they are until the states change."""

    def write(self, name: str, offset: int, values: Tensor) -> None:
        """Set a state from `start + offset` on."""


@dataclass(frozen=True)
class StateShard:
    """A StateRange in memory. states: by name, fp32 `[end - start]`; `write` changes them in place."""

    unit: UnitSpec
    start: int
    end: int
    states: dict[str, Tensor]
    read_late: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """See StateRange."""
        return tuple(self.states)

    def read(self, name: str, first: int, last: int) -> Tensor:
        """See StateRange."""
        return self.states[name][first - self.start : last - self.start]

    def write(self, name: str, offset: int, values: Tensor) -> None:
        """See StateRange."""
        self.states[name][offset : offset + values.numel()].copy_(values)


@dataclass(frozen=True)
class StoredBytes:
    """The bytes of the elements `[first, last)` of a state of which there is no copy: a slice when it is taken."""

    shard: StateRange
    name: str
    first: int
    last: int

    def __len__(self) -> int:
        return 4 * (self.last - self.first)

    def __getitem__(self, part: slice) -> memoryview:
        """Return bytes from `part.start`, a multiple of 4."""
        start, stop, _ = part.indices(len(self))
        # States may be on a GPU, also what stays of those that are offloaded.
        return bytes_of(to_host(self.shard.read(self.name, self.first + start // 4, self.first + stop // 4)))
