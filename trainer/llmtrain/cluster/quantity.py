"""Text of quantities with units, converted to SI numbers."""

import re
from math import isfinite
from typing import Annotated, Literal

from pydantic import Field

Unit = Literal["byte/s", "byte", "s", "FLOP/s"]

# For each unit: its description in errors, and the suffixes that a number may have, with their values in that unit.
_UNITS: dict[Unit, tuple[str, dict[str, float]]] = {
    "byte/s": ("a rate such as 200Gbit/s, 100mbit or 300GB/s", {"bit/s": 1 / 8, "bit": 1 / 8, "B/s": 1}),
    "byte": ("a size such as 80GB or 512GiB", {"B": 1}),
    "s": ("a time such as 3us or 1ms", {"s": 1}),
    "FLOP/s": ("a speed such as 312TFLOP/s", {"FLOP/s": 1}),
}
# Types of keys that hold such a text; an error says the description in place of "text".
Bandwidth = Annotated[str, Field(description=_UNITS["byte/s"][0])]
Size = Annotated[str, Field(description=_UNITS["byte"][0])]
Time = Annotated[str, Field(description=_UNITS["s"][0])]
Speed = Annotated[str, Field(description=_UNITS["FLOP/s"][0])]
# Divisors: 50 / 1e6 is the float nearest to 50e-6, and 50 * 1e-6 is not.
_SMALL = {"": 1.0, "m": 1e3, "u": 1e6, "n": 1e9}
_LARGE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_LARGE["ti"] = 2.0**40
_FORM = re.compile(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?) ?([a-zA-Z]*?)(bit/s|bit|B/s|B|FLOP/s|s)")


def quantity(text: str, unit: Unit) -> float:
    """Return `text` as a number of `unit`: `200Gbit/s` is 25e9 byte/s, `100mbit` 12.5e6 byte/s, `3us` 3e-6 s.

    Prefixes are decimal (k, M, G, T, P, in either case) or binary (Ki, Mi, Gi, Ti); those of seconds are m, u and n.
    Raises ValueError with the second half of a sentence ("expected ...") if the text is no such quantity.
    """
    wanted, words = _UNITS[unit]
    found = _FORM.fullmatch(text)
    prefixes = _SMALL if unit == "s" else _LARGE
    prefix = found[2] if found and unit == "s" else found[2].lower() if found else ""
    if found is None or found[3] not in words or prefix not in prefixes:
        raise ValueError(f"expected {wanted}")
    number, scale = float(found[1]), prefixes[prefix]
    value = number / scale if unit == "s" else number * scale * words[found[3]]
    if not isfinite(value) or (value <= 0 and unit != "s"):
        raise ValueError(f"expected {wanted}, above zero")
    return value
