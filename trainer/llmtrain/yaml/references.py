"""The size of a recipe after its references, `${key}`, are resolved."""

import re
from collections.abc import Iterator
from typing import Any

_REFERENCE = re.compile(r"\$\{\s*(\.*)([^}]*?)\s*\}")
_PART = re.compile(r"[^.\[\]]+")

Place = tuple[str | int, ...]


def resolved_size(content: Any) -> int:
    """Return the number of characters and values of plain data after its references are resolved, without resolving
    them.

    Nested references can multiply, but each place is visited once. References that lead nowhere or in a circle count
    nothing; they are refused later. Raises RecursionError for a chain of about a thousand.
    """
    return _size(content, (), {})


def _size(content: Any, place: Place, known: dict[Place, int]) -> int:
    if place not in known:
        known[place] = 0
        value = _at(content, place)
        size = len(str(value)) if isinstance(value, str | float) else 1
        known[place] = size + sum(_size(content, part, known) for part in _parts(content, place, value))
    return known[place]


def _parts(content: Any, place: Place, value: Any) -> Iterator[Place]:
    """Yield the places of the values that a value contains or refers to."""
    if isinstance(value, dict):
        yield from ((*place, key) for key in value)
    elif isinstance(value, list):
        yield from ((*place, index) for index in range(len(value)))
    elif isinstance(value, str):
        for dots, name in _REFERENCE.findall(value):
            # Each leading dot goes up one level.
            start = place[: -len(dots)] if dots else ()
            if nearest := _nearest(content, (*start, *_PART.findall(name))):
                yield nearest


def _nearest(content: Any, place: Place) -> Place:
    """Return a place with list indices as numbers, cut off at the first key that does not exist."""
    found: Place = ()
    for part in place:
        value = _at(content, found)
        if isinstance(value, list) and str(part).isdecimal() and int(part) < len(value):
            part = int(part)
        elif not isinstance(value, dict) or part not in value:
            break
        found = (*found, part)
    return found


def _at(content: Any, place: Place) -> Any:
    for part in place:
        content = content[part]
    return content
