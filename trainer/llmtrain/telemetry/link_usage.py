"""How much each node's links carry during training: average, 90th percentile and peak (Ul Islam et al.'s table IV).

On each node one rank reads counters once a second, in a thread of its own, and tells the main rank through the ranks'
key-value store, so that no step waits for it.
"""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from math import floor, log
from types import TracebackType
from typing import Any, Self

from llmtrain.comm.ranks import Ranks
from llmtrain.telemetry.counters import Counts, Source, all_sources

# Average, 90th percentile and peak in bytes per second, of what a link sent, received, and of both together.
LinkRates = dict[str, dict[str, dict[str, float]]]

DIRECTIONS = ("sent", "received", "both")
PERIOD = 1.0
# Rates that differ by less than this factor are kept as one, so that a run of weeks needs no more memory than one of
# hours.
_ALIKE = 1.01


class Spread:
    """How a rate was spread over time."""

    def __init__(self) -> None:
        self._moved = self._seconds = self._peak = 0.0
        self._samples: Counter[int] = Counter()

    def add(self, moved: float, seconds: float) -> None:
        """Take note of `moved` bytes in so many seconds."""
        rate = moved / seconds
        self._moved += moved
        self._seconds += seconds
        self._peak = max(self._peak, rate)
        self._samples[floor(log(rate) / log(_ALIKE)) if rate >= 1 else -1] += 1

    def figures(self) -> dict[str, float]:
        """Return average, 90th percentile (to 1%) and peak, in bytes per second."""
        wanted, seen, percentile = 0.9 * self._samples.total(), 0, 0.0
        for level in sorted(self._samples):
            seen += self._samples[level]
            if seen >= wanted:
                percentile = min(_ALIKE ** (level + 1), self._peak) if level >= 0 else 0.0
                break
        return {"average": round(self._moved / self._seconds), "p90": round(percentile), "peak": round(self._peak)}


class LinkMeter:
    """The spreads of every link that some sources count."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._spreads: dict[str, dict[str, Spread]] = {}
        self._last, self._at = self._read(), time.monotonic()

    def sample(self) -> None:
        """Take note of what was moved since the last sample; too soon after it for a rate, of nothing."""
        now = time.monotonic()
        seconds, counts = now - self._at, self._read()
        if seconds < PERIOD / 2:
            return
        for link, (sent, received) in counts.items():
            before = self._last.get(link)
            # A card that came back counts from nothing.
            if before is not None and sent >= before[0] and received >= before[1]:
                spreads = self._spreads.setdefault(link, {direction: Spread() for direction in DIRECTIONS})
                moved = sent - before[0], received - before[1]
                for direction, count in zip(DIRECTIONS, (*moved, sum(moved)), strict=True):
                    spreads[direction].add(count, seconds)
        self._last, self._at = counts, now

    def rates(self) -> LinkRates:
        """Return the figures of every link that has carried anything, by its name."""
        found = {
            link: {direction: spread.figures() for direction, spread in spreads.items()}
            for link, spreads in self._spreads.items()
        }
        return {link: figures for link, figures in found.items() if figures["both"]["peak"]}

    def _read(self) -> Counts:
        return {link: counts for source in self._sources for link, counts in source.counts().items()}


class LinkSampler:
    """Samples this node's links in a `with` block, on one of its ranks; the main rank hears of every node's."""

    def __init__(self, ranks: Ranks, sources: Sequence[Source] | None = None) -> None:
        """sources: what counts here; None: whatever there is."""
        self._ranks, self._sources = ranks, sources
        self._store: Any = None
        self._nodes: dict[int, LinkRates] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._ranks.local_rank == 0:
            # A connection of its own: one that waits for something holds up whoever shares it.
            self._store = self._ranks.store and self._ranks.store.clone()  # type: ignore[attr-defined]
            self._thread = threading.Thread(target=self._work, name="link sampler", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def nodes(self) -> dict[int, LinkRates]:
        """Return what each node's links have carried since the run's last start, as far as it is known here."""
        return dict(self._nodes)

    def busiest(self) -> dict[str, dict[str, float]]:
        """Return for each link the figures of both directions of the node where it carried the most, and the node."""
        found: dict[str, dict[str, float]] = {}
        for node, links in sorted(self.nodes().items()):
            for link, rates in links.items():
                if link not in found or rates["both"]["average"] > found[link]["average"]:
                    found[link] = {"node": node, **rates["both"]}
        return found

    def stop(self) -> None:
        """Take a last sample; stopping twice is harmless."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=5 * PERIOD)
            self._thread = None

    def _work(self) -> None:
        meter = LinkMeter(all_sources() if self._sources is None else self._sources)
        node = self._ranks.rank // int(os.environ.get("LOCAL_WORLD_SIZE", self._ranks.layout.world))
        try:
            number = self._store.add("links", 1) if self._store else 0
            over = False
            while not over:
                over = self._over.wait(PERIOD)
                meter.sample()
                self._nodes[node] = meter.rates()
                # At the end the main rank, which has the store, may be gone before the others.
                if self._store and (self._ranks.is_main or not over):
                    self._exchange(number, node)
        except RuntimeError:
            # The main rank, which has the store, is gone; that is told elsewhere.
            return

    def _exchange(self, number: int, node: int) -> None:
        """Tell this node's figures, or on the main rank hear all others'."""
        if not self._ranks.is_main:
            self._store.set(f"links/{number}", json.dumps([node, self._nodes[node]]))
            return
        for other in range(1, self._store.add("links", 0) + 1):
            if other != number and self._store.check([f"links/{other}"]):
                told, rates = json.loads(self._store.get(f"links/{other}"))
                self._nodes[told] = rates
