"""The keys of a recipe as dotted names, with their types."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Any, get_args, get_origin

from llmtrain.recipe.schema import Recipe
from llmtrain.yaml.expected import options, section_hints

# The index of a section in a list.
INDEX = re.compile(r"\[[0-9]+\]")


@cache
def recipe_keys() -> Mapping[str, Any]:
    """Return the type of every key by its dotted name, sections included. `[]` stands for the index in a list."""
    return MappingProxyType(dict(_walk(Recipe, "")))


def _walk(section: type, prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, hint in section_hints(section).items():
        key = prefix + name
        found.append((key, hint))
        for option in options(hint):
            several = get_origin(option) in (list, tuple)
            section = get_args(option)[0] if several else option
            if is_dataclass(section) and isinstance(section, type):
                found += [(f"{key}[]", section)] if several else []
                found += _walk(section, f"{key}[]." if several else f"{key}.")
    return found


def type_of(key: str) -> Any:
    """Return the type of a key, which may have indices, or be one of a mapping; None if there is no such key."""
    key = INDEX.sub("[]", key)
    parent = recipe_keys().get(key.rpartition(".")[0])
    return get_args(parent)[1] if get_origin(parent) is Mapping else recipe_keys().get(key)


def required_key(key: str) -> str:
    """Return the first key that a missing key needs: itself, or one of its section."""
    for section in filter(is_dataclass, options(type_of(key))):
        for entry in fields(section):
            if entry.default is MISSING and entry.default_factory is MISSING:
                return required_key(f"{key}.{entry.name}")
    return key


def keys_in(section: str) -> list[str]:
    """Return the names of the keys of a section; empty if there is no such section."""
    parts = [name.rpartition(".") for name in recipe_keys()]
    return [leaf for parent, _, leaf in parts if section and parent == section]


def nearest_key(key: str) -> str | None:
    """Return the recipe key that `key` most likely stands for, if misspelt or in the wrong section; None if no key is
    near."""
    key, known = INDEX.sub("[]", key), list(recipe_keys())
    section, _, leaf = key.rpartition(".")
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    siblings = [name for name in known if name.rpartition(".")[0] == section]
    for candidates in (
        [name for name in siblings if name.startswith(f"{key}_")],
        # Nearer than a key of the same name in another section.
        get_close_matches(key, siblings, n=1, cutoff=0.93),
        [leaves[leaf]] if leaf in leaves else [],
        get_close_matches(key, siblings, n=1, cutoff=0.8),
        [leaves[name] for name in get_close_matches(leaf, leaves, n=1, cutoff=0.75)],
    ):
        if candidates:
            return candidates[0]
    return None
