"""The files that a preparation skips, and why; and those of which it replaces bytes."""

from pathlib import Path

from llmtrain_data import units

SHOWN = 3
"""Names that are shown for each reason."""

NOT_TEXT = "not UTF-8 text (binary, or in another encoding; iconv converts)"


class LeftOut:
    """Collects skipped files by reason, and files that are not all UTF-8."""

    def __init__(self) -> None:
        self._files: dict[str, list[Path]] = {}
        self._replaced: list[Path] = []

    def add(self, path: Path, why: str) -> None:
        """Count a file. why: what it is, such as `empty`."""
        self._files.setdefault(why, []).append(path)

    def replaced(self, path: Path) -> None:
        """Count a file of which bytes became U+FFFD. A file is counted once if its blocks come one after another."""
        if self._replaced[-1:] != [path]:
            self._replaced.append(path)

    def count(self) -> int:
        """Return how many files were skipped so far."""
        return sum(map(len, self._files.values()))

    def lines(self, every: bool = False) -> list[str]:
        """Return the lines for the command line, one per reason. every: list the paths of all files."""
        found = list[str]()
        for why, files in self._most_first():
            found += _listed(f"left out   {_some(why, files)}", files, every)
        if self._replaced:
            have = "has" if len(self._replaced) == 1 else "have"
            said = f"{units.count(len(self._replaced), 'file')} {have} bytes that are not UTF-8, which became U+FFFD"
            found += _listed(f"note       {said} (iconv converts other encodings)", self._replaced, every)
        return found

    def clause(self) -> str:
        """Return the skipped files as the end of an error; empty if there are none."""
        return "".join(f"; left out {_some(why, files)}: {_few(files)}" for why, files in self._most_first())

    def _most_first(self) -> list[tuple[str, list[Path]]]:
        return sorted(self._files.items(), key=lambda each: -len(each[1]))


def _some(why: str, files: list[Path]) -> str:
    return f"{units.count(len(files), 'file')}, {why}"


def _listed(said: str, files: list[Path], every: bool) -> list[str]:
    """Return what is said about files, and their names or, with `every`, their paths on lines of their own."""
    if every:
        return [f"{said}:", *map(str, files)]
    return [f"{said}: {_few(files)}{' (--list-left-out lists all)' if len(files) > SHOWN else ''}"]


def _few(files: list[Path]) -> str:
    names = ", ".join(path.name for path in files[:SHOWN])
    return names + (f" and {len(files) - SHOWN} more" if len(files) > SHOWN else "")
