"""The recipe's keys as dotted names, and what each of them takes, in words."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from llmtrain.recipe.schema import Recipe

# The place of a section in a list.
INDEX = re.compile(r"\[[0-9]+\]")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


@cache
def recipe_keys() -> Mapping[str, Any]:
    """Return every key of a recipe by its dotted name, with its type; sections included, those in lists by `[]`."""
    return MappingProxyType(dict(_walk(Recipe, "")))


def _walk(section: type, prefix: str) -> list[tuple[str, Any]]:
    hints = get_type_hints(section, include_extras=True)
    found: list[tuple[str, Any]] = []
    for entry in fields(section):
        key, hint = prefix + entry.name, hints[entry.name]
        if get_origin(hint) is Annotated:
            aliases = [extra.alias for extra in get_args(hint) if isinstance(extra, FieldInfo) and extra.alias]
            key = prefix + (aliases[0] if aliases else entry.name)
        found.append((key, hint))
        for option in _options(hint):
            several = get_origin(option) in (list, tuple)
            section = get_args(option)[0] if several else option
            if is_dataclass(section) and isinstance(section, type):
                found += [(f"{key}[]", section)] if several else []
                found += _walk(section, f"{key}[]." if several else f"{key}.")
    return found


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def expected(hint: Any) -> str:
    """Say what a key of this type takes."""
    if get_origin(hint) is Annotated:
        return f"{expected(get_args(hint)[0])}{_bounds(get_args(hint)[1:])}"
    if get_origin(hint) in (Union, UnionType):
        words = [expected(option) for option in _options(hint) if option is not NoneType]
        return " or ".join(words)
    if get_origin(hint) is Literal:
        values = [str(value) for value in get_args(hint)]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if get_origin(hint) is tuple:
        several = Ellipsis in get_args(hint)
        return f"a list of {'' if several else f'{len(get_args(hint))} '}{_plural(get_args(hint)[0])}"
    if get_origin(hint) is list:
        return f"a list of {_plural(get_args(hint)[0])}"
    if is_dataclass(hint):
        return f"a section with the keys {', '.join(entry.name for entry in fields(hint))}"
    return _WORDS.get(hint, str(hint))


def _bounds(extras: Iterable[Any]) -> str:
    """Return how small and how large a number may be, as the words that follow `a number`."""
    rules = [asdict(rule) for extra in extras for rule in getattr(extra, "metadata", ())]
    limits = {name: f"{value:,}" for rule in rules for name, value in rule.items()}
    if not limits:
        return ""
    low = f"from {limits['ge']}" if "ge" in limits else f"above {limits['gt']}"
    if "lt" in limits:
        return f" {low} and below {limits['lt']}"
    return f" {low}{' to' if 'ge' in limits else ' and up to'} {limits['le']}"


def _plural(hint: Any) -> str:
    """Return the plural of what a list holds."""
    if is_dataclass(hint):
        return expected(hint).replace("a section", "sections")
    options = [(get_args(option) if get_origin(option) is Annotated else (option,)) for option in _options(hint)]
    return " and ".join(_PLURALS.get(kind, str(kind)) + _bounds(extras) for kind, *extras in options)


def nearest_key(key: str) -> str | None:
    """Return the known key that `key` was most likely meant to be: misspelt, or put into the wrong section."""
    key, known = INDEX.sub("[]", key), list(recipe_keys())
    section, _, leaf = key.rpartition(".")
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    siblings = [name for name in known if name.rpartition(".")[0] == section]
    for candidates in (
        [leaves[leaf]] if leaf in leaves else [],
        get_close_matches(key, siblings, n=1, cutoff=0.8),
        [leaves[name] for name in get_close_matches(leaf, leaves, n=1, cutoff=0.75)],
    ):
        if candidates:
            return candidates[0]
    return None
