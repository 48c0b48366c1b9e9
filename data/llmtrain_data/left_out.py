"""The files that a preparation skips, and why; and those of which it replaces bytes."""

from collections import Counter
from pathlib import Path

from llmtrain_data import units

SHOWN = 3
"""Names that are shown for each reason."""


class LeftOut:
    """Counts skipped files by reason, and files that are not all UTF-8. Keeps the first names for each."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._names: dict[str, list[str]] = {}
        self._replaced, self._replaced_names = 0, list[str]()
        self._last: Path | None = None

    def add(self, path: Path, why: str) -> None:
        """Count a file. why: an adjective for `files`, such as `empty`."""
        self._counts[why] += 1
        names = self._names.setdefault(why, [])
        if len(names) < SHOWN:
            names.append(path.name)

    def replaced(self, path: Path) -> None:
        """Count a file of which bytes became U+FFFD. A file is counted once if its blocks come one after another."""
        if path == self._last:
            return
        self._last = path
        self._replaced += 1
        if len(self._replaced_names) < SHOWN:
            self._replaced_names.append(path.name)

    def lines(self) -> list[str]:
        """Return the lines for the command line, one per reason."""
        found = [f"left out   {text}" for text in self._reasons()]
        if count := self._replaced:
            found.append(
                f"note       {units.count(count, 'file')} {'has' if count == 1 else 'have'} bytes that are not UTF-8, "
                f"which became U+FFFD: {_list(self._replaced_names, count)}"
            )
        return found

    def clause(self) -> str:
        """Return the skipped files as the end of an error; empty if there are none."""
        return "".join(f"; left out {text}" for text in self._reasons())

    def _reasons(self) -> list[str]:
        return [
            f"{units.count(count, f'{why} file')}: {_list(self._names[why], count)}"
            for why, count in self._counts.most_common()
        ]


def _list(names: list[str], count: int) -> str:
    return ", ".join(names) + (f" and {count - SHOWN} more" if count > SHOWN else "")
