"""Progress of long work over a corpus: a live bar in a terminal, otherwise a line every 10 seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from llmtrain_data import units
from llmtrain_data.output import Terminal, say

LINE_EVERY = 10.0
"""Seconds between two lines without a terminal."""


class Report(Protocol):
    """Reports progress, in the unit of the corpus."""

    def __call__(self, done: int) -> None:
        """Add `done` to the progress."""


@contextmanager
def progress(title: str, total: int | None, unit: Literal["bytes", "rows"]) -> Iterator[Report]:
    """Show progress on stderr: percentage, rate and remaining time. total: None if it is unknown."""
    if sys.stderr.isatty():
        with _bar(title, total, unit) as report:
            yield report
    else:
        yield _Lines(title, total, unit)


@contextmanager
def _bar(title: str, total: int | None, unit: Literal["bytes", "rows"]) -> Iterator[Report]:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    sizes = (DownloadColumn(binary_units=True), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(show_speed=unit == "rows"))
    with Progress(*columns, *sizes, TimeRemainingColumn(), console=Terminal(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.advance(task, done)


class _Lines:
    """Prints a line every LINE_EVERY seconds."""

    def __init__(self, title: str, total: int | None, unit: str) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._done = 0
        self._started = self._printed = time.monotonic()

    def __call__(self, done: int) -> None:
        self._done += done
        now = time.monotonic()
        if now - self._printed < LINE_EVERY:
            return
        self._printed = now
        rate = self._done / (now - self._started)
        amount, speed = f"{self._done} rows", f"{rate:.0f} rows/s"
        if self._unit == "bytes":
            amount, speed = units.size(self._done), units.rate(rate)
        line = f"{self._title}: {amount}, {speed}"
        if self._total:
            left = max(self._total - self._done, 0) / max(rate, 1e-9)
            line += f", {100 * self._done / self._total:.0f} %, {units.duration(left)} left"
        say(line, err=True)
