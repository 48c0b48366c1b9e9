"""Sharding degrees of model states, and the levels into which they divide the data axis. No torch in here.

A rank along the data axis is a mixed-radix number with one digit per level, the fastest link least significant. A
shard's index has the same digits with the fastest link most significant. The shards of a node then form one contiguous
range, so a gather across nodes and then inside each node needs no copy, and a rank's shard at a larger degree is part
of its shard at a smaller one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from llmtrain.cluster.tiers import Tier


@dataclass(frozen=True)
class Degrees:
    """The number of data-parallel ranks, of `ranks`, over which each model state is sharded. Each divides the next.

    secondary: degree of the secondary copy of the weights; 0 without one.
    """

    ranks: int = 1
    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    secondary: int = 0


@dataclass(frozen=True)
class Level:
    """One digit of a rank: `radix` ranks, `stride` apart. tier: the slowest tier between them, of those along the
    axis."""

    stride: int
    radix: int
    tier: str

    @property
    def span(self) -> int:
        """Number of ranks in this level and all faster ones."""
        return self.stride * self.radix

    def digit(self, rank: int) -> int:
        """This level's digit of `rank`."""
        return rank // self.stride % self.radix

    def members(self, rank: int) -> range:
        """The ranks that differ from `rank` only in this digit, and itself."""
        first = rank - self.digit(rank) * self.stride
        return range(first, first + self.span, self.stride)

    def groups(self, ranks: int) -> list[list[int]]:
        """Every group of ranks below `ranks` that differ only in this digit, in the order of the digit."""
        return [list(self.members(rank)) for rank in range(ranks) if self.digit(rank) == 0]


def levels_of(degrees: Degrees, tiers: Sequence[Tier]) -> tuple[Level, ...]:
    """Return the levels, fastest link first. Every degree is the span of a level, or 1.

    tiers: tiers along the data axis, fastest first. A tier whose size does not form a chain of divisors with the
    degrees is left out.
    """
    borders = {1, degrees.weights, degrees.gradients, degrees.optimizer, degrees.ranks} | {degrees.secondary or 1}
    for tier in tiers:
        if all(tier.ranks % border == 0 or border % tier.ranks == 0 for border in borders):
            borders.add(tier.ranks)
    ordered = sorted(border for border in borders if border <= degrees.ranks)
    return tuple(Level(low, high // low, _tier(high, tiers)) for low, high in pairwise(ordered))


def shard_range(levels: Sequence[Level], rank: int, degree: int, numel: int) -> tuple[int, int]:
    """Return the `[start, end)` that `rank` holds of a state of `numel` elements, sharded `degree` ways."""
    start, size = 0, numel
    for level in levels:
        if level.span <= degree:
            size //= level.radix
            start += level.digit(rank) * size
    return start, start + size


def _tier(span: int, tiers: Sequence[Tier]) -> str:
    return next((tier.name for tier in tiers if tier.ranks % span == 0), tiers[-1].name)
