"""Detect ranks that compute more slowly than others with the same work."""

from bisect import bisect_left
from collections.abc import Sequence
from statistics import median

from llmtrain.cluster.layout import Axis, Layout
from llmtrain.telemetry.metrics import Row

# A straggler takes this many times as long as its peers, in this many samples in a row: processes that share a machine
# may disturb each other for a while.
SLOWER, SAMPLES = 1.25, 3


class Stragglers:
    """Finds stragglers from samples of each rank's own seconds per step."""

    def __init__(self, layout: Layout) -> None:
        # Only the ranks of one stage have the same amount of work.
        self._stages: dict[int, list[int]] = {}
        for rank in range(layout.world):
            self._stages.setdefault(layout.coordinate(rank, Axis.PIPELINE), []).append(rank)
        self._seen = [0] * layout.world
        self._reported: set[int] = set()

    def take(self, seconds: Sequence[float]) -> tuple[Row, dict[int, float]]:
        """Add a sample; return its row for the metrics, and the new stragglers with their ratios to their peers'
        median. A rank is one of them once.

        seconds: by rank, without waiting for others.
        """
        ratios = self._ratios(seconds)
        slowest = max(range(len(ratios)), key=lambda rank: (ratios[rank], seconds[rank]))
        self._seen = [seen + 1 if ratio > SLOWER else 0 for seen, ratio in zip(self._seen, ratios, strict=True)]
        found = {
            rank: ratios[rank] for rank, seen in enumerate(self._seen) if seen == SAMPLES and rank not in self._reported
        }
        self._reported |= found.keys()
        return {"median": median(seconds), "slowest": seconds[slowest], "rank": slowest}, found

    def _ratios(self, seconds: Sequence[float]) -> list[float]:
        ratios = [1.0] * len(seconds)
        for ranks in self._stages.values():
            if len(ranks) > 1:
                ordered = sorted(seconds[rank] for rank in ranks)
                for rank in ranks:
                    ratios[rank] = seconds[rank] / max(_median_of_others(ordered, seconds[rank]), 1e-9)
        return ratios


def _median_of_others(ordered: Sequence[float], value: float) -> float:
    """Return the median of a sorted sequence of two or more without one `value` that is in it."""
    without, others = bisect_left(ordered, value), len(ordered) - 1
    lower, upper = (others - 1) // 2, others // 2
    return (ordered[lower + (lower >= without)] + ordered[upper + (upper >= without)]) / 2
