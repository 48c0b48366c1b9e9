"""Values that YAML 1.1 misreads, corrected by the type of the key."""

from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# The words other than true and false that YAML 1.1 reads as booleans.
WORDS = {False: ("off", "no"), True: ("on", "yes")}


def as_meant(value: Any, hint: Any) -> Any:
    """Return a value of a YAML file as a key of type `hint` means it, recursively for sections and lists.

    An unquoted off, on, yes or no becomes a word if the key accepts that word and no boolean. 1e3 becomes a whole
    number if the key accepts no other number. All other values stay as they are.
    """
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if isinstance(value, bool):
        words = [word for option in options if get_origin(option) is Literal for word in get_args(option)]
        return value if bool in options else next((word for word in WORDS[value] if word in words), value)
    if isinstance(value, float):
        return int(value) if int in options and float not in options and value.is_integer() else value
    if isinstance(value, dict):
        hints: dict[str, Any] = {}
        for section in filter(is_dataclass, options):
            hints |= get_type_hints(section)
        return {key: as_meant(item, hints.get(key)) for key, item in value.items()}
    if isinstance(value, list):
        several = next((get_args(option) for option in options if get_origin(option) in (list, tuple)), ())
        return [as_meant(item, several[0] if several else None) for item in value]
    return value
