"""The values that a key accepts, in words."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}


_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


def section_hints(section: type) -> dict[str, Any]:
    """Return the type of each key of a section, by the name that it has in a file."""
    hints, found = get_type_hints(section, include_extras=True), dict[str, Any]()
    for entry in fields(section):
        hint = hints[entry.name]
        extras = get_args(hint) if get_origin(hint) is Annotated else ()
        aliases = [extra.alias for extra in extras if isinstance(extra, FieldInfo) and extra.alias]
        found[aliases[0] if aliases else entry.name] = hint
    return found


def options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def expected(hint: Any) -> str:
    """Return the values that a key of this type accepts, in words."""
    if get_origin(hint) is Annotated:
        kind, *extras = get_args(hint)
        about = next((extra.description for extra in extras if getattr(extra, "description", None)), None)
        if kind is str and about:
            return str(about)
        return f"{expected(kind)}{_bounds(extras)}{f', {about}' if about else ''}"
    if get_origin(hint) in (Union, UnionType):
        words = [expected(option) for option in options(hint) if option is not NoneType]
        return " or ".join(words)
    if get_origin(hint) is Literal:
        values = [str(value) for value in get_args(hint)]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if get_origin(hint) is tuple:
        several = Ellipsis in get_args(hint)
        return f"a list of {'' if several else f'{len(get_args(hint))} '}{_plural(get_args(hint)[0])}"
    if get_origin(hint) is list:
        return f"a list of {_plural(get_args(hint)[0])}"
    if is_dataclass(hint) and isinstance(hint, type):
        return f"a section with the keys {', '.join(section_hints(hint))}"
    if get_origin(hint) is Mapping:
        return f"keys with {expected(get_args(hint)[1])}"
    return _WORDS.get(hint, str(hint))


def item_of(hint: Any) -> Any:
    """Return the type of the items of the list that a key of this type accepts; None if it accepts no list."""
    kinds = (get_args(option)[0] if get_origin(option) is Annotated else option for option in options(hint))
    return next((get_args(kind)[0] for kind in kinds if get_origin(kind) in (list, tuple)), None)


def choices(hint: Any) -> list[str]:
    """Return the words that a key of this type accepts; empty if it accepts others."""
    return [value for option in options(hint) if get_origin(option) is Literal for value in map(str, get_args(option))]


def _bounds(extras: Iterable[Any]) -> str:
    """Return the bounds of a number, as words that follow `a number`."""
    rules = [asdict(rule) for extra in extras for rule in getattr(extra, "metadata", ())]
    limits = {name: f"{value:,}" for rule in rules for name, value in rule.items()}
    if not limits:
        return ""
    low = f"from {limits['ge']}" if "ge" in limits else f"above {limits['gt']}"
    if "lt" in limits:
        return f" {low} and below {limits['lt']}"
    return f" {low}{' to' if 'ge' in limits else ' and up to'} {limits['le']}"


def _plural(hint: Any) -> str:
    """Return the items of a list in the plural."""
    if is_dataclass(hint) and isinstance(hint, type):
        return expected(hint).replace("a section", "sections")
    kinds = [(get_args(option) if get_origin(option) is Annotated else (option,)) for option in options(hint)]
    return " and ".join(_PLURALS.get(kind, str(kind)) + _bounds(extras) for kind, *extras in kinds)
