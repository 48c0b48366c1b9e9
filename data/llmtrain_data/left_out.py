"""The files of a folder that a preparation skips, and why."""

from collections import Counter
from pathlib import Path

SHOWN = 3
"""Names that are shown for each reason."""


class LeftOut:
    """Counts skipped files by reason, and keeps the first names for each reason."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._names: dict[str, list[str]] = {}

    def add(self, path: Path, why: str) -> None:
        """Count a file. why: an adjective for `files`, such as `empty`."""
        self._counts[why] += 1
        names = self._names.setdefault(why, [])
        if len(names) < SHOWN:
            names.append(path.name)

    def lines(self) -> list[str]:
        """Return the lines for the command line, one per reason."""
        found = []
        for why, count in self._counts.most_common():
            names = ", ".join(self._names[why]) + (f" and {count - SHOWN} more" if count > SHOWN else "")
            found.append(f"left out   {count} {why} file{'s' if count > 1 else ''}: {names}")
        return found
