"""Quantities: how they are shown, and that shown values can be read back."""

import math
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmtrain.cluster.quantity import Unit, quantity
from llmtrain_data import units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.number(999), "999"),
        (units.number(12345.0), "12.3k"),
        (units.number(999_999), "1.00M"),
        (units.number(0.5), "0.500"),
        (units.number(math.inf), "inf"),
        (units.duration(4.21), "4.2 s"),
        (units.duration(65), "1:05"),
        (units.duration(7205), "2:00:05"),
        (units.duration(3 * 86400 + 4 * 3600), "3d 04:00:00"),
        (units.size(1536), "1.50 KiB"),
        (units.size(80 * 2**30), "80.0 GiB"),
        (units.size(12.0), "12 B"),
        (units.size(0), "0 B"),
        (units.rate(12.5e6), "12.5 MB/s"),
        (units.rate(999.99e6), "1.00 GB/s"),
        (units.bit_rate(12.5e6), "100 Mbit/s"),
        (units.seconds(0.00345), "3.45 ms"),
        (units.seconds(0.0), "0 s"),
        (units.flops(312e12), "312 TFLOP/s"),
        (units.flops(17.14e9), "17.1 GFLOP/s"),
    ],
)
def test_quantities_for_people(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    ("shown", "unit"),
    [
        (units.size, "byte"),
        (units.rate, "byte/s"),
        (units.bit_rate, "byte/s"),
        (units.seconds, "s"),
        (units.flops, "FLOP/s"),
    ],
)
@given(value=st.floats(1e-3, 1e15))
def test_what_is_shown_is_read_back(shown: Callable[[float], str], unit: Unit, value: float) -> None:
    text = shown(value)
    assert re.fullmatch(r"[\d.]+ \S+", text)
    # Values are rounded to three digits, bytes to a thousandth.
    assert quantity(text, unit) == pytest.approx(value, rel=0.006, abs=6e-4)
