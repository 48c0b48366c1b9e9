"""The grid of ranks: its axes and groups. No torch in here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import prod


class Axis(Enum):
    """A dimension of the grid of ranks."""

    PIPELINE = "pipeline"
    DATA = "data"
    TENSOR = "tensor"

    # Members are unique. Enum's own hash, of the name, is slow, and plans ask for the coordinates of many ranks.
    __hash__ = object.__hash__


@dataclass(frozen=True)
class Layout:
    """The grid of ranks. The last axis varies fastest: consecutive ranks are neighbours along it.

    degrees: ranks along each axis, the slowest-varying axis first. An axis that is left out has degree 1.
    """

    degrees: Mapping[Axis, int]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.degrees.values())

    def degree(self, *axes: Axis) -> int:
        """Number of ranks along the product of `axes`."""
        return prod(self.degrees.get(axis, 1) for axis in axes)

    def coordinate(self, rank: int, *axes: Axis) -> int:
        """Coordinate of `rank` along the product of `axes`; the layout's last one of them varies fastest."""
        coordinate = 0
        for axis in self._ordered(axes):
            coordinate = coordinate * self.degrees[axis] + rank // self._strides[axis] % self.degrees[axis]
        return coordinate

    def groups(self, *axes: Axis) -> list[list[int]]:
        """Every group of ranks that differ only in their coordinate along the product of `axes`, in the order of
        that coordinate."""
        others = [axis for axis in self.degrees if axis not in axes]
        members = self._ranks_along(axes)
        return [[first + member for member in members] for first in self._ranks_along(others)]

    def group_of(self, rank: int, *axes: Axis) -> list[int]:
        """The group along the product of `axes` that `rank` is in."""
        members = self._ranks_along(axes)
        first = rank - members[self.coordinate(rank, *axes)]
        return [first + member for member in members]

    def _ranks_along(self, axes: Iterable[Axis]) -> list[int]:
        """Return the ranks whose coordinate along all axes but `axes` is 0, in order."""
        found = [0]
        for axis in self._ordered(axes):
            found = [first + step * self._strides[axis] for first in found for step in range(self.degrees[axis])]
        return found

    def _ordered(self, axes: Iterable[Axis]) -> list[Axis]:
        """Return `axes` in the order of the layout, without those that it leaves out."""
        return [axis for axis in self.degrees if axis in axes]

    @cached_property
    def _strides(self) -> dict[Axis, int]:
        """Ranks between neighbours along each axis. Cached for the same reason."""
        axes = list(self.degrees)
        return {axis: prod(self.degrees[faster] for faster in axes[index + 1 :]) for index, axis in enumerate(axes)}


def even_share(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Return the `[start, end)` of part `index` of `parts` of a flat range; sizes differ by at most 1."""
    return numel * index // parts, numel * (index + 1) // parts
