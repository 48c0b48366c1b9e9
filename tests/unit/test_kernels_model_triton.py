"""Whole models with Triton's kernels, without a GPU."""

from pathlib import Path

import pytest

from tests.triton_lab import run_interpreted

pytest.importorskip("triton")


def test_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_model.py"))
