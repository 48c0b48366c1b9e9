"""An error of pydantic about a recipe, as one sentence."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from llmtrain.recipe.keys import keys_in, nearest_key, recipe_keys, required_key, type_of
from llmtrain.recipe.other_words import KEYS, SECTIONS, VALUES, unsupported
from llmtrain.yaml.expected import choices, expected, item_of, options
from llmtrain.yaml.shown import shown, shown_key
from llmtrain.yaml.yaml11 import WORDS

_UNKNOWN, _MISSING, _VALUE = "unexpected_keyword_argument", "missing", "value_error"
# A text that YAML would read as a number or a boolean without quotes.
_UNQUOTED = re.compile(r"\s*(?:[-+]?\d[\d_.]*(?:[eE][-+]?\d+)?|true|false)\s*", re.IGNORECASE)
# Characters of a value that are compared with the words that a key accepts.
_LONGEST_WORD = 60


def explain(error: ValidationError, source: str) -> str:
    """Return the key, the value, what was expected and what to do, for the first error. source: the files that were
    read. They are named where one of their keys is not quoted."""
    # Unknown keys come first, because an unknown key is often a missing key, misspelt. A union reports an error for
    # each of its members; among the errors about one key, the most specific one is shown.
    found = [(_key(details["loc"]), details) for details in error.errors(include_url=False)]
    found.sort(key=lambda item: item[1]["type"] != _UNKNOWN)
    first = found[0][0]
    about_first = [
        (key, details) for key, details in found if key == first or key.startswith((f"{first}.", f"{first}["))
    ]
    key, details = min(about_first, key=lambda item: _rank(item[1]["type"], item[0]))
    if details["type"] == _UNKNOWN:
        name = str(details["loc"][-1])
        return _missing_space(key, name) or unknown_key(
            ".".join(filter(None, (key, name))),
            # A file with a section of a recipe is one, and may be quoted.
            shown if key else lambda unknown: shown_key(unknown, source),
            isinstance(details["input"], Mapping),
        )
    if details["type"] == _VALUE:
        return ".".join(filter(None, (key, str(details["ctx"]["error"]))))
    if details["type"].startswith(_MISSING) and isinstance(details["loc"][-1], str):
        key = required_key(key)
        return f"{key} is missing; set it in the recipe" + (
            "" if "[" in key else f" or on the command line as {key}=..."
        )
    hint = type_of(key)
    value = details["input"]
    if _is_quoted(details, hint):
        return f'{key} is the text "{shown(value)}", in quotes; expected {expected(hint)}'
    # The places of plain values in lists are no part of a key.
    places = [part for part in details["loc"] if isinstance(part, int)][key.count("[") :]
    if places and not details["type"].startswith(_MISSING) and (item := item_of(hint)) is not None:
        return f"{key}[{places[0]}] is {shown(value)}; expected {expected(item)}"
    return f"{key} is {shown(value)}; expected {expected(hint)}{_advice(key, value, hint)}"


def _is_quoted(details: Any, hint: Any) -> bool:
    """Return whether a refused value is a text that would be a number or a boolean without its quotes, where `hint`
    takes one."""
    value, kind = details["input"], details["type"]
    takes_one = kind.startswith(("int_", "float_", "bool_")) or value in choices(hint)
    return isinstance(value, str) and takes_one and _UNQUOTED.fullmatch(value) is not None


def _advice(key: str, value: Any, hint: Any) -> str:
    """Return what to write in place of a value that `key`, of type `hint`, does not accept; else nothing."""
    if _accepts(hint, [value]) and len(str(value)) <= _LONGEST_WORD:
        return f"; write {key}=[{shown(value)}]"
    meant = _meant(key, value)
    if meant is not None:
        return f"; did you mean {meant}?"
    word = str(value)[:_LONGEST_WORD].lower()
    if isinstance(value, str) and (why := unsupported(word)):
        return f"; {why}"
    near = get_close_matches(word, choices(hint), n=1)
    if near:
        return f"; did you mean {near[0]}?"
    if str not in options(hint) or not isinstance(value, bool | int | float):
        return ""
    # The word that was written is lost: yaml has made a boolean or a number of it.
    words = (*WORDS[value], shown(value)) if isinstance(value, bool) else (shown(value),)
    kind = shown(value) if isinstance(value, bool) else "a number"
    return (
        f'; YAML reads {" or ".join(words)} without quotes as {kind}: write "{words[0]}" with its quotes, on the '
        f"command line as {key}='\"{words[0]}\"'"
    )


def _meant(key: str, value: Any) -> str | None:
    """Return what a value of another program's words, or one in place of a section, most likely means."""
    if (key, shown(value).lower()) in VALUES:
        return VALUES[key, shown(value).lower()]
    inner = SECTIONS.get(key)
    # A value that the inner key refuses as well is no advice.
    if inner is None or not isinstance(value, str | int | float) or isinstance(value, bool):
        return None
    return f"{inner}={shown(value)}" if _accepts(type_of(inner), value) else None


def _accepts(hint: Any, value: Any) -> bool:
    """Return whether a key of type `hint` accepts a value."""
    config = None if is_dataclass(hint) else ConfigDict(strict=True)
    try:
        TypeAdapter(hint, config=config).validate_json(json.dumps(value))
    except ValidationError:
        return False
    return True


def unknown_key(key: str, quoted: Callable[[str], str] = shown, of_keys: bool = False) -> str:
    """Return a sentence that `key` is not a recipe key, with the nearest key that is, or else those of its section.
    quoted: returns what of the key is quoted. of_keys: whether it was given keys of its own in place of a value."""
    if key == "extends":
        return "extends is read only in a recipe's file; write it there, or name the other recipe in place of this one"
    advice = _advice_for_key(key.lower().replace("-", "_"), of_keys)
    section, siblings = key.rpartition(".")[0], keys_in(key.rpartition(".")[0])
    known = f"{section} has the keys {', '.join(siblings)}" if siblings else "`llmtrain recipes schema` lists the keys"
    return f"{quoted(key)} is not a recipe key; {advice or known}"


def advice_on_option(option: str) -> str | None:
    """Return a sentence about an option that is a recipe's key, or another program's word for one or for a feature
    that is not supported; None for any other option."""
    word = option.lstrip("-").lower().replace("-", "_")
    leaf = word.rpartition(".")[2]
    key = SECTIONS.get(word) or KEYS.get(leaf) or (word if type_of(word) is not None else None)
    if key is None and (why := unsupported(word)):
        return why
    near = key or nearest_key(word)
    # One word that is only like a key may as well be a misspelt option.
    if near is None or "[" in near or (key is None and leaf == word and not near.endswith(f".{word}")):
        return None
    return f"a recipe's key is written without dashes: {near}=..."


def _advice_for_key(key: str, of_keys: bool) -> str | None:
    """Return what to write in place of an unknown key, or that its feature is not supported; None if neither is known.
    of_keys: see `unknown_key`."""
    *sections, leaf = key.split(".")
    if leaf not in KEYS and (why := unsupported(key)):
        return why
    # Some words of other programs are sections there, such as offload_optimizer.
    meant = [KEYS[word] for word in reversed(sections) if word in KEYS]
    near = KEYS.get(key) or KEYS.get(leaf) or nearest_key(key, of_keys) or next(iter(meant), None)
    return f"did you mean {near}?" if near else None


def _missing_space(section: str, name: str) -> str | None:
    """Return a sentence about a key such as `steps:500`, which YAML reads as one word; None for any other key."""
    key, colon, value = name.partition(":")
    if not colon:
        return None
    if not section:
        if key not in {known.rpartition(".")[2] for known in recipe_keys()}:
            return None
        # A line of a private file may begin with any word and a colon: do not quote the rest.
        return f"the recipe has no space after '{key}:'; put one there"
    return f"{section} has {shown(name)!r}; put a space after the colon: {key}: {shown(value)}"


def _rank(kind: str, key: str) -> tuple[bool, int, int]:
    # An error inside a section is more specific than "the section is no text". A number outside its bounds has the
    # right type, so its error is more specific than those of other types.
    specific = kind == _VALUE or kind.startswith(("greater_than", "less_than"))
    return kind != _UNKNOWN, -key.count(".") - key.count("["), 0 if specific else 2 if kind.startswith(_MISSING) else 1


def _key(location: tuple[int | str, ...]) -> str:
    """Return the key in pydantic's location, such as `cluster.clusters[0].speed`. The other parts of a location are
    members of unions, and places in lists of plain values."""
    key = ""
    for part in location:
        longer = f"{key}[{part}]" if isinstance(part, int) else f"{key}.{part}" if key else part
        if type_of(longer) is not None:
            key = longer
    return key
