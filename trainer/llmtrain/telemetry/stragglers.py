"""Detect ranks that compute more slowly than others with the same work."""

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
        self._peers = [_peers(layout, rank) for rank in range(layout.world)]
        self._suspect: int | None = None
        self._seen = 0

    def take(self, seconds: Sequence[float]) -> tuple[Row, tuple[int, float] | None]:
        """Add a sample; return its row for the metrics, and (rank, ratio to its peers' median) of a new straggler, else
        None.

        seconds: by rank, without waiting for others.
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
    """Return the other ranks of the same stage: only these have the same amount of work."""
    stage = layout.coordinate(rank, Axis.PIPELINE)
    others = [other for other in range(layout.world) if other != rank]
    return [other for other in others if layout.coordinate(other, Axis.PIPELINE) == stage]
