"""The one place that prints: what a file says reaches the terminal as text, and never steers it.

Control characters, marks that change the direction of text, and other characters without a shape are shown as Python
writes them (`\\x1b`, `\\u202e`). Line ends and tabs stay.
"""

import json
import sys
import unicodedata
from collections.abc import Iterable
from math import isfinite
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# The joiners have no shape, but Persian, Indic scripts and many emoji are written with them.
_LAYOUT = frozenset("\n\t\u200c\u200d")


def printable(value: object) -> str:
    """Return a value as text in which nothing steers a terminal."""
    text = str(value)
    return text if text.isprintable() else "".join(map(_shown, text))


def say(value: object = "", *, end: str = "\n", err: bool = False) -> None:
    """Print a value as a line, with what would steer a terminal escaped. err: on stderr."""
    print(printable(value), end=end, file=sys.stderr if err else sys.stdout, flush=True)


def say_json(data: Any, indent: int | None = None) -> None:
    """Print data as JSON."""
    say(json_text(data, indent))


def json_text(data: Any, indent: int | None = None) -> str:
    """Return data as JSON in ASCII. What is not finite becomes null, as JSON has no NaN and no infinity."""
    return json.dumps(_jsonable(data), indent=indent, allow_nan=False)


class Terminal(Console):
    """rich's console, for text from files: it knows no markup, and escapes what would steer the terminal."""

    def __init__(self, **options: Any) -> None:
        """options: of rich's console."""
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Any:
        """Return a string as rich's text, escaped before its width is measured."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is printed; only rich itself may move the cursor."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


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
