"""The keys of a recipe as dotted names, with their types."""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from llmtrain.recipe.schema import Recipe
from llmtrain.yaml.expected import options

# The index of a section in a list.
INDEX = re.compile(r"\[[0-9]+\]")


@cache
def recipe_keys() -> Mapping[str, Any]:
    """Return the type of every key by its dotted name, sections included. `[]` stands for the index in a list."""
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
        for option in options(hint):
            several = get_origin(option) in (list, tuple)
            section = get_args(option)[0] if several else option
            if is_dataclass(section) and isinstance(section, type):
                found += [(f"{key}[]", section)] if several else []
                found += _walk(section, f"{key}[]." if several else f"{key}.")
    return found


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
