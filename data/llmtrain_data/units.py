"""Formats quantities in one style: three significant digits, a space, then the unit.

Sizes of memory and files have binary prefixes (`15.1 MiB`). Rates have decimal prefixes (`569 MB/s`, `100 Gbit/s`), as
vendors state them. The suffix of a count belongs to the number (`6.45k tokens/s`, `124M parameters`). Cluster files use
the same style; `llmtrain.cluster.quantity` parses it.
"""

from collections.abc import Sequence
from math import isfinite

_Prefixes = Sequence[tuple[float, str]]
_DECIMAL: _Prefixes = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_BINARY: _Prefixes = ((2.0**40, "Ti"), (2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"), (1.0, ""))
_SMALL: _Prefixes = ((1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))
# Seconds, about 30,000 years. Only a damaged file has longer times.
_LONGEST = 1e12
_COUNTS: _Prefixes = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def number(value: float) -> str:
    """Format a count with a decimal suffix: 12345 is `12.3k`, 999 is `999`, 0.5 is `0.500`."""
    return _scaled(value, _COUNTS)


def count(number: int, noun: str) -> str:
    """Format a number of things: `1 file`, `1,200 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(count: float) -> str:
    """Format bytes with a binary prefix: 1536 is `1.50 KiB`."""
    return _scaled(count, _BINARY, "B")


def size_or_dash(count: float | None) -> str:
    """Format bytes as `size` does; a dash for an unknown number."""
    return "-" if count is None else size(count)


def rate(bytes_per_s: float) -> str:
    """Format bytes per second: 12.5e6 is `12.5 MB/s`."""
    return _scaled(bytes_per_s, _DECIMAL, "B/s")


def bit_rate(bytes_per_s: float) -> str:
    """Format bytes per second in bits, as for network cards: 12.5e6 is `100 Mbit/s`."""
    return _scaled(bytes_per_s * 8, _DECIMAL, "bit/s")


def flops(rate: float) -> str:
    """Format operations per second: 312e12 is `312 TFLOP/s`."""
    return _scaled(rate, _DECIMAL, "FLOP/s")


def seconds(value: float) -> str:
    """Format a short time: 0.00345 is `3.45 ms`."""
    return _scaled(value, _SMALL, "s")


def duration(seconds: float) -> str:
    """Format a long time: `4.2 s`, `1:05` (minutes), `2:00:05` (hours), `3d 04:00:00`; above _LONGEST `1e+99 s`."""
    if not seconds < _LONGEST:
        return f"{seconds:.0e} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _scaled(value: float, prefixes: _Prefixes, unit: str = "") -> str:
    if not value or not isfinite(value):
        return f"{value:.0f} {unit}".strip()
    # Compare after rounding to three digits: 999,999 is 1.00M, not 1000k.
    scale, prefix = next((entry for entry in prefixes if abs(value) >= 0.9995 * entry[0]), prefixes[-1])
    shown = f"{value:.0f}" if scale == 1 and value % 1 == 0 else _three_digits(value / scale)
    return f"{shown} {prefix}{unit}" if unit else f"{shown}{prefix}"


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{3 if abs(value) < 0.9995 else digits}f}"
