"""The one place that prints: what a file says reaches the terminal as text, and never steers it.

Control characters, marks that change the direction of text, and other characters without a shape are shown as Python
writes them (`\\x1b`, `\\u202e`). Line ends and tabs stay.
"""

import json
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

# The joiners have no shape, but Persian, Indic scripts and many emoji are written with them.
_LAYOUT = frozenset("\n\t\u200c\u200d")
# What stands at the right of its column: `-`, `1,234`, `4/10`, `1:05`, `98.0%`, `15.1 MiB`.
_QUANTITY = re.compile(r"-|[\d.,:/?]+( ?[A-Za-z%][A-Za-z/%]*)?")
# Columns of what is no terminal: a file has no edge to cut or fold at.
_NO_EDGE = 100_000


def printable(value: object) -> str:
    """Return a value as text in which nothing steers a terminal."""
    text = str(value)
    return text if text.isprintable() else "".join(map(_shown, text))


def say(value: object = "", *, end: str = "\n", err: bool = False) -> None:
    """Print a value as a line, with what would steer a terminal escaped. err: on stderr."""
    print(printable(value), end=end, file=sys.stderr if err else sys.stdout, flush=True)


def say_long(text: str) -> None:
    """Print lines; through the user's pager, as git does, where a terminal has too few for all of them."""
    terminal = Terminal()
    if not terminal.is_terminal or text.count("\n") < terminal.height:
        say(text, end="")
        return
    import pydoc  # 0.04 s that no other verb needs

    os.environ.setdefault("LESS", "FRX")
    pydoc.pager(printable(text))


def say_json(data: Any, indent: int | None = None) -> None:
    """Print data as JSON."""
    say(json_text(data, indent))


def json_text(data: Any, indent: int | None = None) -> str:
    """Return data as JSON in ASCII. What is not finite becomes null, as JSON has no NaN and no infinity."""
    try:
        return json.dumps(data, indent=indent, allow_nan=False)
    except (ValueError, TypeError):
        return json.dumps(_jsonable(data), indent=indent, allow_nan=False)


class Terminal(Console):
    """rich's console, for text from files: it knows no markup, and escapes what would steer the terminal. A file gets
    lines as long as they are."""

    def __init__(self, **options: Any) -> None:
        """options: of rich's console."""
        super().__init__(highlight=False, markup=False, emoji=False, **options)
        if "width" not in options and not self.is_terminal:
            self.width = _NO_EDGE

    def render_str(self, text: str, **options: Any) -> Any:
        """Return a string as rich's text, escaped before its width is measured."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is printed; only rich itself may move the cursor."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table in the one style that all verbs print: no lines, a bold header, quantities at the right. columns:
    their headings; none for a list of facts, without a heading."""
    cells = [[printable(cell) for cell in row] for row in rows]
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=bool(columns))
    for place, name in enumerate(columns):
        right = cells and all(_QUANTITY.fullmatch(row[place]) for row in cells)
        found.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in cells:
        found.add_row(*row)
    return found


def say_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on stdout: folded where the terminal is too narrow, never cut."""
    Terminal().print(table(columns, rows))


def _shown(letter: str) -> str:
    category = unicodedata.category(letter)
    steers = letter not in _LAYOUT and (category[0] == "C" or category in ("Zl", "Zp"))
    return repr(letter)[1:-1] if steers else letter


def _jsonable(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value
