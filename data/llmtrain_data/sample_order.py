"""The order of samples: a keyed permutation of any length, and the source of each position in a blend.

Both are pure functions of the position. They store no order, and a batch depends only on the seed and its position.
"""

from fractions import Fraction
from math import lcm

import numpy as np

ROUNDS = 6
MAX_PERIOD = 1 << 16


def mix(values: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of each uint64 value: the finalizer of SplitMix64 (Steele, Lea, Flood, 2014)."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def epoch_keys(seed: int, source: int, epochs: np.ndarray) -> np.ndarray:
    """Return the uint64 key of each epoch's permutation of the source's samples."""
    key = mix(np.full(len(epochs), seed % 2**64, np.uint64))
    key = mix(key ^ np.uint64(source))
    return mix(key ^ epochs.astype(np.uint64))


def permute(positions: np.ndarray, length: int, keys: np.ndarray) -> np.ndarray:
    """Map each position in [0, length) by its key's permutation of [0, length); int64, same shape.

    A balanced Feistel network over the smallest even number of bits that holds `length`, applied repeatedly until the
    value lies in [0, length): cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). This
    takes at most four applications on average.
    """
    half = max((max(length - 1, 1).bit_length() + 1) // 2, 1)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    values = positions.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        values[outside] = _feistel(values[outside], keys[outside], shift, mask)
        outside = outside[values[outside] >= np.uint64(length)]
    return values.astype(np.int64)


def _feistel(values: np.ndarray, keys: np.ndarray, shift: np.uint64, mask: np.uint64) -> np.ndarray:
    left, right = values >> shift, values & mask
    for number in range(ROUNDS):
        # The round function depends on the key, and on the round's number in the top bits.
        hashed = mix(keys ^ right ^ np.uint64(number << 56))
        left, right = right, left ^ (hashed & mask)
    return (left << shift) | right


class Interleave:
    """Interleaves the sources of a blend: gives each position a source and an index into it.

    The pattern is periodic. It rounds weights to fractions with a common denominator of at most 65536: weights such as
    0.7 and 0.3 exactly, others to within 1/65536. After n positions, the count of each of k sources differs from its
    share of n by at most 1 - 1/(2k - 2), the best possible bound (Tijdeman, "The chairman assignment problem", Discrete
    Mathematics 32, 1980).
    """

    def __init__(self, weights: list[float]) -> None:
        """Compute the pattern. weights: positive."""
        counts = whole_shares(weights)
        self.period = sum(counts)
        self._counts = np.array(counts, np.int64)
        self._pattern = _chairman(counts)
        self._ranks = np.empty(self.period, np.int64)
        for source in range(len(counts)):
            chosen = self._pattern == source
            self._ranks[chosen] = np.arange(chosen.sum())

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, number of earlier positions with this source) for each position, both int64."""
        periods, inside = np.divmod(positions, self.period)
        sources = self._pattern[inside]
        return sources, periods * self._counts[sources] + self._ranks[inside]

    def counts(self, positions: int) -> list[int]:
        """Return how many of the first `positions` positions each source has."""
        periods, rest = divmod(positions, self.period)
        last = np.bincount(self._pattern[:rest], minlength=len(self._counts))
        return [periods * each + more for each, more in zip(self._counts.tolist(), last.tolist(), strict=True)]


def whole_shares(weights: list[float]) -> list[int]:
    """Return integers in proportion to the weights, with a sum of at most MAX_PERIOD."""
    fractions = [Fraction(weight / sum(weights)).limit_denominator(MAX_PERIOD) for weight in weights]
    period = lcm(*(fraction.denominator for fraction in fractions))
    if sum(fractions) == 1 and min(fractions) > 0 and period <= MAX_PERIOD:
        return [int(fraction * period) for fraction in fractions]
    exact = [weight / sum(weights) * MAX_PERIOD for weight in weights]
    shares = [max(int(share), 1) for share in exact]
    # The largest remainders round up, so that the sum is MAX_PERIOD.
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: max(MAX_PERIOD - sum(shares), 0)]:
        shares[i] += 1
    return shares


def _chairman(counts: list[int]) -> np.ndarray:
    """Return the source of each position of one period, int64 `[period]` (Tijdeman's algorithm)."""
    if len(counts) == 1:
        return np.zeros(counts[0], np.int64)
    period, slack = sum(counts), 1 / (2 * len(counts) - 2)
    weights = np.array(counts) / period
    deficit = np.zeros(len(counts))
    pattern = np.empty(period, np.int64)
    for position in range(period):
        deficit += weights
        # Among the eligible sources, choose the one with the earliest deadline.
        deadline = np.where(deficit >= slack - 1e-9, (1 - slack - deficit) / weights, np.inf)
        chosen = int(deadline.argmin())
        deficit[chosen] -= 1
        pattern[position] = chosen
    return pattern
