"""Measure the traffic of each node's links during training: average, 90th percentile and peak (Ul Islam et al.'s
table IV).

On each node, a thread of one rank reads counters once a second and publishes the rates to the main rank through the
ranks' key-value store, so that no step waits for it.
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
from llmtrain.telemetry.counters import CounterSource, Counts, all_sources

# By link, then by direction: average, 90th percentile and peak in bytes per second.
LinkRates = dict[str, dict[str, dict[str, float]]]

DIRECTIONS = ("sent", "received", "both")
PERIOD = 1.0
# The histogram's bins grow by this factor, so that a run of weeks needs no more memory than one of hours.
_BIN = 1.01


class RateHistogram:
    """The distribution of a rate over time."""

    def __init__(self) -> None:
        self._moved = self._seconds = self._peak = 0.0
        self._samples: Counter[int] = Counter()

    def add(self, moved: float, seconds: float) -> None:
        """Add a sample of `moved` bytes in `seconds`."""
        rate = moved / seconds
        self._moved += moved
        self._seconds += seconds
        self._peak = max(self._peak, rate)
        self._samples[floor(log(rate) / log(_BIN)) if rate >= 1 else -1] += 1

    def figures(self) -> dict[str, float]:
        """Return average, 90th percentile (to 1%) and peak, in bytes per second."""
        wanted, seen, percentile = 0.9 * self._samples.total(), 0, 0.0
        for level in sorted(self._samples):
            seen += self._samples[level]
            if seen >= wanted:
                percentile = min(_BIN ** (level + 1), self._peak) if level >= 0 else 0.0
                break
        return {"average": round(self._moved / self._seconds), "p90": round(percentile), "peak": round(self._peak)}


class LinkMeter:
    """The rates of every link that some sources count."""

    def __init__(self, sources: Sequence[CounterSource]) -> None:
        self._sources = sources
        self._histograms: dict[str, dict[str, RateHistogram]] = {}
        self._last, self._at = self._read(), time.monotonic()

    def sample(self) -> None:
        """Add the bytes since the last sample; does nothing if that is less than half a period ago."""
        now = time.monotonic()
        seconds, counts = now - self._at, self._read()
        if seconds < PERIOD / 2:
            return
        for link, (sent, received) in counts.items():
            before = self._last.get(link)
            # A card that was reset counts from 0 again.
            if before is not None and sent >= before[0] and received >= before[1]:
                histograms = self._histograms.setdefault(link, {direction: RateHistogram() for direction in DIRECTIONS})
                moved = sent - before[0], received - before[1]
                for direction, count in zip(DIRECTIONS, (*moved, sum(moved)), strict=True):
                    histograms[direction].add(count, seconds)
        self._last, self._at = counts, now

    def rates(self) -> LinkRates:
        """Return the figures of every link with any traffic, by name."""
        found = {
            link: {direction: histogram.figures() for direction, histogram in histograms.items()}
            for link, histograms in self._histograms.items()
        }
        return {link: figures for link, figures in found.items() if figures["both"]["peak"]}

    def _read(self) -> Counts:
        return {link: counts for source in self._sources for link, counts in source.counts().items()}


class LinkSampler:
    """Samples this node's links in a `with` block, on one of its ranks; the main rank collects those of every node."""

    def __init__(
        self, ranks: Ranks, sources: Sequence[CounterSource] | None = None, more: Sequence[CounterSource] = ()
    ) -> None:
        """sources: the counters to read; None: all that this machine has. more: counters of this run alone."""
        self._ranks, self._sources, self._more = ranks, sources, more
        self._store: Any = None
        self._nodes: dict[int, LinkRates] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._ranks.local_rank == 0:
            # This thread needs its own connection: a call that waits would block other users of a shared one.
            self._store = self._ranks.store and self._ranks.store.clone()  # type: ignore[attr-defined]
            self._thread = threading.Thread(target=self._work, name="link sampler", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def nodes(self) -> dict[int, LinkRates]:
        """Return the rates of each node's links since the run's last start, as far as this rank knows them."""
        return dict(self._nodes)

    def busiest(self) -> dict[str, dict[str, float]]:
        """Return for each link the node with the highest average, and its figures of both directions together."""
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
        meter = LinkMeter([*(all_sources() if self._sources is None else self._sources), *self._more])
        node = self._ranks.rank // int(os.environ.get("LOCAL_WORLD_SIZE", self._ranks.layout.world))
        try:
            number = self._store.add("links", 1) if self._store else 0
            over = False
            while not over:
                over = self._over.wait(PERIOD)
                meter.sample()
                self._nodes[node] = meter.rates()
                # At the end the main rank, which hosts the store, may be gone before the others.
                if self._store and (self._ranks.is_main or not over):
                    self._publish(number, node)
        except RuntimeError:
            # The main rank, which hosts the store, is gone; other code reports that.
            return

    def _publish(self, number: int, node: int) -> None:
        """Publish this node's figures, or on the main rank read those of the other nodes."""
        if not self._ranks.is_main:
            self._store.set(f"links/{number}", json.dumps([node, self._nodes[node]]))
            return
        for other in range(1, self._store.add("links", 0) + 1):
            if other != number and self._store.check([f"links/{other}"]):
                sender, rates = json.loads(self._store.get(f"links/{other}"))
                self._nodes[sender] = rates
