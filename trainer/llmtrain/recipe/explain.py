"""What pydantic found wrong with a recipe, as one sentence."""

from pydantic import ValidationError

from llmtrain.recipe.keys import INDEX, nearest_key, recipe_keys
from llmtrain.yaml.expected import expected
from llmtrain.yaml.shown import shown

_UNKNOWN, _MISSING, _VALUE = "unexpected_keyword_argument", "missing", "value_error"


def explain(error: ValidationError) -> str:
    """Name the key, the value, what was expected and what to do, for the first thing that is wrong."""
    # An unknown key is told first, as a key that seems to be missing is often the same one misspelt. A union reports
    # an error for each of its members: those about one key are weighed together, and the one that says most is told.
    found = [(_key(details["loc"]), details) for details in error.errors(include_url=False)]
    found.sort(key=lambda item: item[1]["type"] != _UNKNOWN)
    first = found[0][0]
    about_first = [
        (key, details) for key, details in found if key == first or key.startswith((f"{first}.", f"{first}["))
    ]
    key, details = min(about_first, key=lambda item: _rank(item[1]["type"], item[0]))
    if details["type"] == _UNKNOWN:
        return unknown_key(".".join(filter(None, (key, str(details["loc"][-1])))))
    if details["type"] == _VALUE:
        return ".".join(filter(None, (key, str(details["ctx"]["error"]))))
    if details["type"].startswith(_MISSING) and isinstance(details["loc"][-1], str):
        return f"{key} is missing; set it in the recipe" + (
            "" if "[" in key else f" or on the command line as {key}=..."
        )
    return f"{key} is {shown(details['input'])}; expected {expected(recipe_keys()[INDEX.sub('[]', key)])}"


def unknown_key(key: str) -> str:
    """Say that `key` is no key of a recipe, and which one is nearest."""
    near = nearest_key(key)
    advice = f"did you mean {near}?" if near else "`llmtrain recipes schema` lists the keys"
    return f"{shown(key)} is not a recipe key; {advice}"


def _rank(kind: str, key: str) -> tuple[bool, int, int]:
    # What is wrong inside a section says more than that the section is no text. A number beside its bounds is of the
    # right type, so that it says more than what another type finds wrong.
    said_more = kind == _VALUE or kind.startswith(("greater_than", "less_than"))
    return kind != _UNKNOWN, -key.count(".") - key.count("["), 0 if said_more else 2 if kind.startswith(_MISSING) else 1


def _key(location: tuple[int | str, ...]) -> str:
    """Return the part of pydantic's location that is a key, such as `cluster.clusters[0].speed`; the rest names members
    of unions and places in lists of other things than sections."""
    key = ""
    for part in location:
        longer = f"{key}[{part}]" if isinstance(part, int) else f"{key}.{part}" if key else part
        if INDEX.sub("[]", longer) in recipe_keys():
            key = longer
    return key
