"""Ranks that compute more slowly than others with the same work."""

from collections.abc import Sequence
from statistics import median

from llmtrain.cluster.layout import Axis, Layout
from llmtrain.telemetry.metrics import Row

# How much longer than its peers a rank takes that is clearly slower, and how many samples in a row show it: processes
# that share a machine disturb each other for a while.
SLOWER, SAMPLES = 1.25, 3


class Stragglers:
    """Follows each rank's own seconds per step, sample by sample."""

    def __init__(self, layout: Layout) -> None:
        self._peers = [_peers(layout, rank) for rank in range(layout.world)]
        self._suspect: int | None = None
        self._seen = 0

    def take(self, seconds: Sequence[float]) -> tuple[Row, tuple[int, float] | None]:
        """Return what a sample is for the metrics, and a rank that has turned out to be clearly slower than its peers,
        with how many times longer it takes; each only once in a row.

        seconds: by rank, without what it waited for others.
        """
        ratios = [
            seconds[rank] / max(median(seconds[peer] for peer in peers), 1e-9) if peers else 1.0
            for rank, peers in enumerate(self._peers)
        ]
        slowest = max(range(len(ratios)), key=lambda rank: (ratios[rank], seconds[rank]))
        row = {"median": median(seconds), "slowest": seconds[slowest], "rank": slowest}
        suspect = slowest if ratios[slowest] > SLOWER else None
        self._seen = self._seen + 1 if suspect == self._suspect else 1
        self._suspect = suspect
        found = suspect is not None and self._seen == SAMPLES
        return row, (slowest, ratios[slowest]) if found else None


def _peers(layout: Layout, rank: int) -> list[int]:
    """Return the other ranks with the same work, those of the same stage: none may have more of it than another."""
    stage = layout.coordinate(rank, Axis.PIPELINE)
    others = [other for other in range(layout.world) if other != rank]
    return [other for other in others if layout.coordinate(other, Axis.PIPELINE) == stage]
