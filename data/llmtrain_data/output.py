"""All printing goes through this module. It escapes text from files, so that it cannot control the terminal.

It shows control characters, direction marks and other invisible characters as Python escapes (`\\x1b`, `\\u202e`). Line
ends and tabs stay.
"""

import json
import os
import re
import stat
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

# The two joiners are invisible, but Persian, Indic scripts and many emoji need them.
_LAYOUT = frozenset("\n\t\u200c\u200d")
# Right-aligned cells: `-`, `1,234`, `4/10`, `1:05`, `98.0%`, `15.1 MiB`.
_QUANTITY = re.compile(r"-|[\d.,:/?]+( ?[A-Za-z%][A-Za-z/%]*)?")
# Width of output that is no terminal, so that rich never folds lines.
_NO_EDGE = 100_000


def printable(value: object) -> str:
    """Return a value as text, with terminal control characters escaped."""
    text = str(value)
    return text if text.isprintable() else "".join(map(_shown, text))


def say(value: object = "", *, end: str = "\n", err: bool = False) -> None:
    """Print a value as a line, with terminal control characters escaped. err: print to stderr; what that cannot
    take, as on a full disk, is lost. Raises OSError where stdout cannot take it."""
    stream = sys.stderr if err else sys.stdout
    try:
        # In one write: another rank's line, or the end of the process, could come between a line and its end.
        print(printable(value) + end, end="", file=stream, flush=True)
    except BrokenPipeError:
        _discard(stream)
    except OSError:
        if not err:
            raise
        _drop_unwritten(stream)


def show_cursor() -> None:
    """Show the terminal's cursor, which a live line hides, before the process ends without ending the line."""
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)


def leave_terminal() -> None:
    """Discard what is printed to a terminal from now on: it was closed, and writes to it fail."""
    for stream in (sys.stdout, sys.stderr):
        # A closed terminal no longer says that it is one.
        if stat.S_ISCHR(os.fstat(stream.fileno()).st_mode):
            _discard(stream)


def _discard(stream: IO[str]) -> None:
    """Discard what is printed to a stream from now on: the reader of its pipe has ended (`| head`), which is no reason
    to end a run."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _drop_unwritten(stream: IO[str]) -> None:
    """Drop what a stream still holds after a write that failed. Python would write it at its end, and fail."""
    kept = os.dup(stream.fileno())
    _discard(stream)
    stream.flush()
    os.dup2(kept, stream.fileno())
    os.close(kept)


def say_json(data: Any, indent: int | None = None) -> None:
    """Print data as JSON."""
    say(json_text(data, indent))


def json_text(data: Any, indent: int | None = None) -> str:
    """Return data as ASCII JSON. NaN and infinity become null, because JSON lacks them."""
    try:
        return json.dumps(data, indent=indent, allow_nan=False)
    except (ValueError, TypeError):
        return json.dumps(_jsonable(data), indent=indent, allow_nan=False)


class Terminal(Console):
    """A rich console for text from files: without markup, and with terminal control characters escaped. It never folds
    lines in a file."""

    def __init__(self, **options: Any) -> None:
        """options: options of rich's console."""
        super().__init__(highlight=False, markup=False, emoji=False, **options)
        if "width" not in options and not self.is_terminal:
            self.width = _NO_EDGE

    def on_broken_pipe(self) -> None:
        """Go on in silence, where rich would end the process."""
        self.quiet = True
        _discard(self.file)

    def log_line(self, text: str, style: str = "") -> None:
        """Print a line of a log, which is never cut. A line that cannot be written, as on a full disk, is lost, and
        not those after it."""
        try:
            self.print(text, style=style, soft_wrap=True)
        except OSError:
            # rich would print it again before the next line.
            self._buffer.clear()
            _drop_unwritten(self.file)

    def render_str(self, text: str, **options: Any) -> Any:
        """Return a string as rich text, escaped before rich measures its width."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments to print. Only rich's own control segments stay unescaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table in the common style of all commands: no lines, a bold header, quantities right-aligned. columns:
    headings; empty for a table without a header."""
    cells = [[printable(cell) for cell in row] for row in rows]
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=bool(columns))
    for index, name in enumerate(columns):
        right = cells and all(_QUANTITY.fullmatch(row[index]) for row in cells)
        found.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in cells:
        found.add_row(*row)
    return found


def say_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table to stdout. Cells fold if the terminal is too narrow; they are never truncated."""
    console = Terminal()
    if console.is_terminal:
        console.print(table(columns, rows))
        return
    with console.capture() as capture:
        console.print(table(columns, rows))
    # rich pads every line to the longest one, which in a file may have thousands of characters.
    say("".join(f"{line.rstrip(' ')}\n" for line in capture.get().splitlines()), end="")


def _shown(letter: str) -> str:
    category = unicodedata.category(letter)
    escaped = letter not in _LAYOUT and (category[0] == "C" or category in ("Zl", "Zp"))
    return repr(letter)[1:-1] if escaped else letter


def _jsonable(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value
