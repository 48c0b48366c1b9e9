"""Orders that need no memory: a keyed permutation of any length, and the sources of a blend's positions.

Both are functions of position alone, so that a batch depends on nothing but the seed and where it starts.
"""

from fractions import Fraction
from math import lcm

import numpy as np

ROUNDS = 6
MAX_PERIOD = 1 << 16


def mix(values: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of each uint64 value: the finaliser of splitmix64 (Steele, Lea, Flood, 2014)."""
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
    """Return where each position of [0, length) goes under its key's permutation; int64, one to one per key.

    A balanced Feistel network over the smallest even number of bits that holds `length`, walked until the
    value lies inside (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). At most four walks
    on average.
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
        # The key decides the round function; its rounds differ by the number in the top bits.
        hashed = mix(keys ^ right ^ np.uint64(number << 56))
        left, right = right, left ^ (hashed & mask)
    return (left << shift) | right


class Interleave:
    """Which source each position takes, and the how-manieth sample of that source it is.

    The pattern repeats: weights are taken as fractions of a common denominator up to 65536 (written weights
    such as 0.7 and 0.3 exactly, others to within 1/65536). At every position n, the count of each source is
    within 1 - 1/(2k - 2) of its share of n for k sources, which is the best possible bound. Source:
    Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980).
    """

    def __init__(self, weights: list[float]) -> None:
        """Make the pattern for positive `weights`."""
        counts = _whole_shares(weights)
        self.period = sum(counts)
        self._counts = np.array(counts, np.int64)
        self._pattern = _chairman(counts)
        self._ranks = np.empty(self.period, np.int64)
        for source in range(len(counts)):
            chosen = self._pattern == source
            self._ranks[chosen] = np.arange(chosen.sum())

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, how many samples of it came before) of each position, both int64."""
        rounds, inside = np.divmod(positions, self.period)
        sources = self._pattern[inside]
        return sources, rounds * self._counts[sources] + self._ranks[inside]


def _whole_shares(weights: list[float]) -> list[int]:
    """Return whole numbers in proportion to the weights, with a sum of at most MAX_PERIOD."""
    fractions = [Fraction(weight / sum(weights)).limit_denominator(MAX_PERIOD) for weight in weights]
    period = lcm(*(fraction.denominator for fraction in fractions))
    if sum(fractions) == 1 and min(fractions) > 0 and period <= MAX_PERIOD:
        return [int(fraction * period) for fraction in fractions]
    exact = [weight / sum(weights) * MAX_PERIOD for weight in weights]
    shares = [max(int(share), 1) for share in exact]
    # Largest remainders first, so that the shares add up.
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: max(MAX_PERIOD - sum(shares), 0)]:
        shares[i] += 1
    return shares


def _chairman(counts: list[int]) -> np.ndarray:
    """Return the source of each position of one period; int64."""
    if len(counts) == 1:
        return np.zeros(counts[0], np.int64)
    period, slack = sum(counts), 1 / (2 * len(counts) - 2)
    weights = np.array(counts) / period
    deficit = np.zeros(len(counts))
    pattern = np.empty(period, np.int64)
    for position in range(period):
        deficit += weights
        # Among the sources that are due, the one that would be late first.
        deadline = np.where(deficit >= slack - 1e-9, (1 - slack - deficit) / weights, np.inf)
        chosen = int(deadline.argmin())
        deficit[chosen] -= 1
        pattern[position] = chosen
    return pattern
