"""Values of a file as error messages quote them."""

import json
import re
from typing import Any

_KEY = re.compile(r"[\w.\[\]-]{1,60}")


def shown(value: Any) -> str:
    """Return a value as a recipe writes it, truncated if it is long."""
    if isinstance(value, int) and abs(value) >= 10**19:
        # Python refuses to print numbers of thousands of digits; a float can hold up to 308.
        return f"{value:.3g}" if value.bit_length() < 1024 else f"a number of {value.bit_length()} bits"
    try:
        text = value if isinstance(value, str) and value.strip() else json.dumps(value, default=str)
    except (ValueError, RecursionError):
        return "a list or section that is too deep, or has a number of thousands of digits"
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def shown_key(key: str, file: str = "it") -> str:
    """Return an unknown key of a file. A file of another kind may be private: its text is quoted only if it looks like
    a key."""
    return shown(key) if _KEY.fullmatch(key) else f"a line of {file}"
