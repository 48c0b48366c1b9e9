"""Degrees of model states, and the levels of ranks that they cut the data axis into. Pure data, no torch.

A place along the data axis is a number of mixed radix, one digit for each level, the fastest link first. A shard's
index has the same digits with the fastest link most significant: what a node holds together is then one contiguous
range, so a gather across nodes and then inside a node lands in place, and a rank's shard at a larger degree lies inside
its shard at a smaller one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from llmtrain.cluster.tiers import Tier


@dataclass(frozen=True)
class Degrees:
    """Over how many of `ranks` data-parallel ranks each model state is cut; each divides the next.

    secondary: of the second copy of the weights; 0 where there is none.
    """

    ranks: int = 1
    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    secondary: int = 0

    def state_bytes(self, numel: int, compute_bytes: int) -> int:
        """Return the bytes of one rank's model states for `numel` parameters, without padding.

        Weights in the compute dtype of `compute_bytes`, gradients, master weights and two moments in fp32; where all
        is fp32 and the optimizer states lie inside the weights, those are the master weights.
        """
        masters = 0 if compute_bytes == 4 else 4
        held = [(compute_bytes, self.weights), (4, self.gradients), (8 + masters, self.optimizer)]
        if self.secondary:
            held.append((compute_bytes, self.secondary))
        return sum(numel * size // degree for size, degree in held)


@dataclass(frozen=True)
class Level:
    """One digit of a place: `radix` ranks, `stride` places apart. tier: the slowest link between them."""

    stride: int
    radix: int
    tier: str

    @property
    def span(self) -> int:
        """Ranks of this level and all faster ones together."""
        return self.stride * self.radix

    def digit(self, place: int) -> int:
        """This level's digit of `place`."""
        return place // self.stride % self.radix

    def groups(self, ranks: int) -> list[list[int]]:
        """Every group of places below `ranks` that differ in this digit alone, in the digit's order."""
        first = [place for place in range(ranks) if self.digit(place) == 0]
        return [[place + digit * self.stride for digit in range(self.radix)] for place in first]


def levels_of(degrees: Degrees, tiers: Sequence[Tier]) -> tuple[Level, ...]:
    """Return the levels from the fastest link to the slowest; every degree is the span of one of them, or 1.

    tiers: along the data axis, fastest first. One that no chain of divisors through the degrees passes is left out.
    """
    borders = {1, degrees.weights, degrees.gradients, degrees.optimizer, degrees.ranks} | {degrees.secondary or 1}
    for tier in tiers:
        if all(tier.ranks % border == 0 or border % tier.ranks == 0 for border in borders):
            borders.add(tier.ranks)
    ordered = sorted(border for border in borders if border <= degrees.ranks)
    return tuple(Level(low, high // low, _tier(high, tiers)) for low, high in pairwise(ordered))


def shard_range(levels: Sequence[Level], place: int, degree: int, numel: int) -> tuple[int, int]:
    """Return the `[start, end)` of `numel` elements that `place` holds of a state cut `degree` ways."""
    start, size = 0, numel
    for level in levels:
        if level.span <= degree:
            size //= level.radix
            start += level.digit(place) * size
    return start, start + size


def _tier(span: int, tiers: Sequence[Tier]) -> str:
    return next((tier.name for tier in tiers if tier.ranks % span == 0), tiers[-1].name)
