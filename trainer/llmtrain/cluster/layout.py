"""Who does what, as pure data: the only source of truth about ranks. No torch in here."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod


class Axis(Enum):
    """A dimension of the mesh of ranks."""

    PIPELINE = "pipeline"
    DATA = "data"
    TENSOR = "tensor"


@dataclass(frozen=True)
class Layout:
    """The mesh of ranks. The last axis varies fastest, so that neighbouring ranks are neighbours along it.

    degrees: ranks along each axis, slowest axis first. An axis that is left out has one.
    """

    degrees: Mapping[Axis, int]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.degrees.values())

    def degree(self, axis: Axis) -> int:
        """Number of ranks along `axis`."""
        return self.degrees.get(axis, 1)

    def coordinate(self, rank: int, axis: Axis) -> int:
        """Place of `rank` along `axis`."""
        return rank // self._stride(axis) % self.degree(axis)

    def groups(self, axis: Axis) -> list[list[int]]:
        """Every group of ranks that differ only in their place along `axis`; each in order of that place."""
        stride, degree = self._stride(axis), self.degree(axis)
        span = stride * degree
        return [
            list(range(rank, rank + span, stride))
            for start in range(0, self.world, span)
            for rank in range(start, start + stride)
        ]

    def group_of(self, rank: int, axis: Axis) -> list[int]:
        """The group along `axis` that `rank` is in."""
        first = rank - self.coordinate(rank, axis) * self._stride(axis)
        return [first + place * self._stride(axis) for place in range(self.degree(axis))]

    def _stride(self, axis: Axis) -> int:
        if axis not in self.degrees:
            return 1
        axes = list(self.degrees)
        return prod(self.degrees[faster] for faster in axes[axes.index(axis) + 1 :])


def even_share(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Return the `[start, end)` that part `index` of `parts` takes of a flat range; sizes differ by at most 1."""
    return numel * index // parts, numel * (index + 1) // parts
