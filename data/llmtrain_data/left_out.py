"""The files of a folder that are not read, and why."""

from collections import Counter
from pathlib import Path

SHOWN = 3
"""Names that are given for each reason."""


class LeftOut:
    """Counts files by the reason for which they are left out, and keeps the first names of each."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._names: dict[str, list[str]] = {}

    def add(self, path: Path, why: str) -> None:
        """Count a file. why: a word or two that fit before `files`, such as `empty`."""
        self._counts[why] += 1
        names = self._names.setdefault(why, [])
        if len(names) < SHOWN:
            names.append(path.name)

    def lines(self) -> list[str]:
        """Return what the command line says about them: a line for each reason, none where all files are read."""
        found = []
        for why, count in self._counts.most_common():
            names = ", ".join(self._names[why]) + (f" and {count - SHOWN} more" if count > SHOWN else "")
            found.append(f"left out   {count} {why} file{'s' if count > 1 else ''}: {names}")
        return found
