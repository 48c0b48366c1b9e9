"""The keys of a recipe as dotted names, with their types."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType, NoneType
from typing import Any, get_args, get_origin

from llmtrain.recipe.schema import Recipe
from llmtrain.yaml.expected import options, section_hints

# The index of a section in a list.
INDEX = re.compile(r"\[[0-9]+\]")
# Letters of words that are like too many others to guess what they mean.
_SHORT = 3


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


def nearest_key(key: str, of_keys: bool = False) -> str | None:
    """Return the recipe key that `key` most likely stands for, if misspelt or in the wrong section; None if no key is
    near. of_keys: whether it was given keys of its own, as a section is, in place of a value."""
    section, _, leaf = INDEX.sub("[]", key).rpartition(".")
    takes = _takes_keys if of_keys else _takes_a_value
    known = [name for name, hint in recipe_keys().items() if takes(hint) and not name.endswith("]")]
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    if len(leaf) <= _SHORT:
        return leaves.get(leaf)
    for names, found in (
        (siblings, [name for name in siblings if name.startswith(f"{leaf}_")]),
        # Nearer than a key of the same name in another section.
        (siblings, get_close_matches(leaf, siblings, n=1, cutoff=0.88)),
        (leaves, [leaf] if leaf in leaves else []),
        (siblings, get_close_matches(leaf, siblings, n=1, cutoff=0.75)),
        (leaves, get_close_matches(leaf, leaves, n=1, cutoff=0.8)),
    ):
        if found:
            return names[found[0]]
    return None


def _takes_keys(hint: Any) -> bool:
    return any(is_dataclass(option) or get_origin(option) is Mapping for option in options(hint))


def _takes_a_value(hint: Any) -> bool:
    return not all(is_dataclass(option) or option is NoneType for option in options(hint))
