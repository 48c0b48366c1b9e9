"""A recipe's references, `${key}`: the size of what they add, and those that lead nowhere."""

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
        yield from filter(None, (_nearest(content, target) for target in _targets(path, value)))


def lost_reference(content: Any, path: KeyPath = ()) -> tuple[KeyPath, KeyPath] | None:
    """Return the place of a value in plain data that refers to a key that is not there, and that key; None if there is
    no such value. path: of the part to look at."""
    value = _at(content, path)
    if isinstance(value, str):
        lost = (target for target in _targets(path, value) if len(_nearest(content, target)) < len(target))
        return next(((path, target) for target in lost), None)
    parts = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return next(filter(None, (lost_reference(content, (*path, part)) for part in parts)), None)


def _targets(path: KeyPath, text: str) -> Iterator[KeyPath]:
    """Yield the key paths that a text at `path` refers to."""
    for dots, name in _REFERENCE.findall(text):
        # Each leading dot goes up one level.
        yield (*(path[: -len(dots)] if dots else ()), *_PART.findall(name))


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
