"""The size of a recipe after its references, `${key}`, are resolved."""

import re
from collections.abc import Iterator
from typing import Any

_REFERENCE = re.compile(r"\$\{\s*(\.*)([^}]*?)\s*\}")
_PART = re.compile(r"[^.\[\]]+")

KeyPath = tuple[str | int, ...]


def resolved_size(content: Any) -> int:
    """Return the number of characters and values of plain data after its references are resolved, without resolving
    them.

    Nested references can multiply, but each place is visited once. References that lead nowhere or in a circle count
    nothing; they are refused later. Raises RecursionError for a chain of about a thousand.
    """
    return _size(content, (), {})


def _size(content: Any, path: KeyPath, known: dict[KeyPath, int]) -> int:
    if path not in known:
        known[path] = 0
        value = _at(content, path)
        size = len(str(value)) if isinstance(value, str | float) else 1
        known[path] = size + sum(_size(content, part, known) for part in _parts(content, path, value))
    return known[path]


def _parts(content: Any, path: KeyPath, value: Any) -> Iterator[KeyPath]:
    """Yield the key paths of the values that a value contains or refers to."""
    if isinstance(value, dict):
        yield from ((*path, key) for key in value)
    elif isinstance(value, list):
        yield from ((*path, index) for index in range(len(value)))
    elif isinstance(value, str):
        for dots, name in _REFERENCE.findall(value):
            # Each leading dot goes up one level.
            start = path[: -len(dots)] if dots else ()
            if nearest := _nearest(content, (*start, *_PART.findall(name))):
                yield nearest


def _nearest(content: Any, path: KeyPath) -> KeyPath:
    """Return a key path with list indices as numbers, cut off at the first key that does not exist."""
    found: KeyPath = ()
    for part in path:
        value = _at(content, found)
        if isinstance(value, list) and str(part).isdecimal() and int(part) < len(value):
            part = int(part)
        elif not isinstance(value, dict) or part not in value:
            break
        found = (*found, part)
    return found


def _at(content: Any, path: KeyPath) -> Any:
    for part in path:
        content = content[part]
    return content
