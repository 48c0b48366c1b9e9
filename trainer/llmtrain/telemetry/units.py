"""Quantities as people read them."""

from math import isfinite


def number(value: float) -> str:
    """Format a count with a decimal suffix: 12345 is `12.3k`, 999 is `999`, 0.5 is `0.500`."""
    if not isfinite(value):
        return str(value)
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # Compared after rounding to three digits, so that 999,999 is 1.00M and not 1000k.
        if abs(value) >= 0.9995 * size:
            return f"{_three_digits(value / size)}{suffix}"
    return str(value) if isinstance(value, int) else _three_digits(value)


def duration(seconds: float) -> str:
    """Format seconds as `4.2s`, `1:05` (minutes), `2:00:05` (hours) or `3d 04:00:00`."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def size(count: float) -> str:
    """Format bytes with a binary suffix: 1536 is `1.50 KiB`."""
    for shift, suffix in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(count) >= 2**shift:
            return f"{_three_digits(count / 2**shift)} {suffix}"
    return f"{count:.0f} B"


def rate(bytes_per_s: float) -> str:
    """Format bytes per second with a decimal suffix: 12.5e6 is `12.5 MB/s`."""
    for scale, suffix in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_s >= scale:
            return f"{_three_digits(bytes_per_s / scale)} {suffix}"
    return f"{bytes_per_s:.0f} B/s"


def flops(rate: float) -> str:
    """Format operations per second: 312e12 is `312 TFLOP/s`."""
    for scale, suffix in ((1e12, "TFLOP/s"), (1e9, "GFLOP/s")):
        if rate >= scale:
            return f"{_three_digits(rate / scale)} {suffix}"
    return f"{_three_digits(rate / 1e6)} MFLOP/s"


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{3 if abs(value) < 0.9995 else digits}f}"
