"""Mutations of valid inputs: of the values of a document, of text, and of bytes."""

import json
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from random import Random
from typing import Any

import yaml

Place = tuple[Any, Any]
"""A list or mapping, and the index or key of a value in it."""

MAX_PLACES = 100_000
"""Most values of a document that is mutated again: a larger one would exhaust the reader's memory limit."""

WORDS = (
    "", " ", "auto", "off", "no", "null", "true", "none", "0", "-1", "1e400", "nan", ".inf", "²", "१२", "1_000", "0x10",
    "10GB", "-5GB", "1e999GB", "9" * 400 + "TB", "1:30", "100GB/s", "0us", "\x1b[2J", "\u202egnp", "a\0b", "\ufeff",
    "a\nb", "\u2028", "é" * 300, "x" * 20_000, "../../etc/passwd", "/dev/zero", "/", ".", "${name}", "${oc.env:HOME}",
    "${" * 50, "???", "<<", "*a", "!!python/name:os.system", "2026-01-01", "-", "[1", "{", "%d", "{}", "\\", "'", '"',
    "all", "node", "int8", "fp32", "gpt2", "llama-7b", "1e9", "99999999999", "0-99999999999", "1,2", "98,1,1", "#", "=",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 7, 8, 255, 256, 257, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**40, 10**9, 10**12, 10**18, 2**53 + 1,
    2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400, -(10**400), 0.0, -0.0, 0.5, 0.1, 1.5, 1e-8, 1e-320, 1e18, 1e100,
    1e308, -1e308, math.inf, -math.inf, math.nan,
)  # fmt: skip
TOKENS = (
    b"[", b"]", b"{", b"}", b",", b":", b'"', b"'", b"\n", b"\r\n", b"\t", b" ", b"- ", b"? ", b"&a ", b"*a ",
    b"!!set ", b"!!binary ", b"!!python/object:os.x ", b"!x ", b"<<: *a\n", b"---\n", b"...\n", b"%YAML 9.9\n",
    b"|\n", b">-\n", b"#", b"null", b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e-400", b"0x1F", b"\\ud800",
    b"\\u0000", b"\0", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1b[2J", b"\xe2\x80\xae",
    b"9" * 400, b"1" * 5000, b"[" * 2000, b"[" * 100_000, b"{" * 3000, b'{"a":' * 30_000, b"- " * 3000, b"(" * 2000,
    b"${", b"}" * 50, b'"' + b"x" * 70_000 + b'"',
)  # fmt: skip
SIZES = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    255,
    256,
    2**15,
    2**16 - 1,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**63 - 1,
    2**63,
    2**64 - 1,
)


def odd_value(random: Random) -> Any:
    """Return an unusual value."""
    kind = random.randrange(12)
    if kind < 4:
        return random.choice(WORDS)
    if kind < 8:
        return random.choice(NUMBERS)
    if kind == 8:
        return random.choice((None, True, False, [], {}, [[]], {"": ""}, [None], {"a": {"b": {}}}))
    if kind == 9:
        return [random.choice((0, "a", 1.5, None))] * random.choice((1, 2, 3, 10, 1000))
    if kind == 10:
        return {str(number): number for number in range(random.choice((1, 3, 50, 1000)))}
    return nested(random.choice((3, 30, 90, 300)), random.random() < 0.5)


def nested(depth: int, as_list: bool) -> Any:
    """Return nested lists, or nested mappings."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if as_list else {"a": value}
    return value


def places(value: Any) -> Iterator[Place]:
    """Yield the place of every value inside `value`, each before those inside of it. It may be nested to any depth."""
    left: list[Place] = _entries(value)[::-1]
    while left:
        holder, key = left.pop()
        yield holder, key
        left += _entries(holder[key])[::-1]


def _entries(value: Any) -> list[Place]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys]


def change_document(document: Any, random: Random) -> Any:
    """Mutate some values of a document in place, and return it. Sometimes return another value instead."""
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        found = list(islice(places(document), MAX_PLACES))
        if len(found) == MAX_PLACES:
            return document
        if not found or random.random() < 0.02:
            return odd_value(random)
        holder, key = random.choice(found)
        with suppress(RecursionError):
            random.choice(_CHANGES)(holder, key, random, found)
    return document


def _replace(holder: Any, key: Any, random: Random, found: list[Place]) -> None:
    holder[key] = odd_value(random)


def _copy(holder: Any, key: Any, random: Random, found: list[Place]) -> None:
    other, at = random.choice(found)
    # Copy by JSON: a container of itself would never end.
    holder[key] = json.loads(json.dumps(other[at], default=str))


def _scale(holder: Any, key: Any, random: Random, found: list[Place]) -> None:
    value = holder[key]
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100:
        factors = (-1, 2, 3, 10, 1000, 10**9, 0.5, 1e-3)
        holder[key] = random.choice((value + 1, value - 1, str(value), [value], *(value * each for each in factors)))
    elif isinstance(value, str):
        cut = random.randrange(len(value) + 1)
        holder[key] = value[:cut] + random.choice(WORDS) + value[cut:]
    else:
        holder[key] = odd_value(random)


def _remove(holder: Any, key: Any, random: Random, found: list[Place]) -> None:
    if isinstance(holder, dict):
        holder.pop(key, None)
    elif len(holder) > key:
        holder.pop(key)


def _add(holder: Any, key: Any, random: Random, found: list[Place]) -> None:
    value = odd_value(random)
    if isinstance(holder, dict):
        name = random.choice((random.choice(WORDS), str(key), f"{key}x"))
        holder[name] = value
    else:
        holder.insert(random.randrange(len(holder) + 1), value)


def _repeat(holder: Any, key: Any, random: Random, found: list[Place]) -> None:
    if isinstance(holder, list):
        holder.extend(json.loads(json.dumps(holder, default=str)) * random.choice((1, 2, 100 // (len(holder) + 1))))
    else:
        _replace(holder, key, random, found)


_CHANGES: tuple[Callable[[Any, Any, Random, list[Place]], None], ...] = (
    _replace, _replace, _replace, _scale, _scale, _copy, _remove, _add, _repeat,
)  # fmt: skip


def as_json(document: Any) -> bytes:
    """Return a document as JSON. NaN and infinities are as Python writes them."""
    try:
        return json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except RecursionError:
        # Mutations may have nested values too deeply for json.
        return b"[" * 5000


def as_yaml(document: Any, random: Random) -> bytes:
    """Return a document as YAML, in a random style."""
    if random.random() < 0.5:
        return as_json(document)
    try:
        text = yaml.safe_dump(document, default_flow_style=random.choice((None, True, False)), allow_unicode=True)
    except (yaml.YAMLError, RecursionError):
        return as_json(document)
    return str(text).encode("utf-8", "surrogatepass")


def change_text(text: bytes, random: Random) -> bytes:
    """Return a text with a part inserted, removed, repeated or replaced."""
    start, end = sorted(random.randrange(len(text) + 1) for _ in range(2))
    end = min(end, start + random.choice((1, 2, 10, 100, len(text))))
    return random.choice(
        (
            lambda: text[:start] + random.choice(TOKENS) + text[start:],
            lambda: text[:start] + random.choice(TOKENS) + text[end:],
            lambda: text[:start] + text[end:],
            lambda: text[:start],
            lambda: text[:end] + text[start:end] * random.choice((1, 2, 50)) + text[end:],
            lambda: random.choice(TOKENS),
            lambda: change_bytes(text, random),
        )
    )()


def change_bytes(data: bytes, random: Random) -> bytes:
    """Return binary data with bits flipped, numbers replaced, parts removed or moved."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        at = random.randrange(len(changed) + 1)
        kind = random.randrange(8)
        if kind < 3 and changed:
            changed[min(at, len(changed) - 1)] ^= 1 << random.randrange(8)
        elif kind < 5:
            width, code = random.choice(((1, "B"), (2, "H"), (4, "I"), (8, "Q")))
            near = int.from_bytes(changed[at : at + width], "little") + random.choice((-1, 1))
            number = random.choice((*SIZES, near)) % (1 << 8 * width)
            changed[at : at + width] = struct.pack(f"<{code}", number)
        elif kind == 5:
            del changed[at : at + random.choice((1, 4, 8, 100, len(changed)))]
        elif kind == 6:
            changed[at:at] = bytes(random.choice((1, 8, 1000))) if random.random() < 0.5 else changed[: at // 2]
        else:
            other = random.randrange(len(changed) + 1)
            changed[at : at + 16] = changed[other : other + 16]
    return bytes(changed[: 4 * len(data) + 100_000])
