"""Sums of records of numbers."""

from dataclasses import fields
from typing import TypeVar

T = TypeVar("T")


def summed(first: T, second: T) -> T:
    """Return a dataclass of numbers whose every field is the sum of those of two others."""
    return type(first)(
        **{one.name: getattr(first, one.name) + getattr(second, one.name) for one in fields(first)}  # type: ignore[arg-type]
    )
