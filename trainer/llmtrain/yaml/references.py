"""How long a recipe becomes when its references, `${key}`, are replaced by what they stand for."""

import re
from collections.abc import Iterator
from typing import Any

_REFERENCE = re.compile(r"\$\{\s*(\.*)([^}]*?)\s*\}")
_PART = re.compile(r"[^.\[\]]+")

Place = tuple[str | int, ...]


def resolved_size(content: Any) -> int:
    """Return how many characters and values plain data has once its references are resolved, without resolving them.

    References of references may multiply; each place is looked at once. Those that lead nowhere or in a circle count
    nothing: they are refused later. Raises RecursionError for a chain of a thousand.
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
    """Yield the places of what a value holds or refers to."""
    if isinstance(value, dict):
        yield from ((*place, key) for key in value)
    elif isinstance(value, list):
        yield from ((*place, index) for index in range(len(value)))
    elif isinstance(value, str):
        for dots, name in _REFERENCE.findall(value):
            # As many dots as levels to go up.
            start = place[: -len(dots)] if dots else ()
            if nearest := _nearest(content, (*start, *_PART.findall(name))):
                yield nearest


def _nearest(content: Any, place: Place) -> Place:
    """Return a place as its keys are, or that of the reference that leads there."""
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
