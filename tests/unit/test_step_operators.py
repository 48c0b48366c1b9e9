"""How many kernels a block launches on a GPU, and which of them read or write fp32, in a step that computes in bf16."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tools.fake_cuda.library import compiler

# Kernels of a block in the first microbatch of a step, with its optimizer step, and in each further one.
KERNELS = {"gpt2-124m": (37, 32), "llama3.2-1b": (35, 30), "pythia-160m": (39, 34)}
# The optimizer; sums of gradients; the gradient of the head, which its product adds up, and its factor.
WIDE = {"adamw", "squared_sum", "accumulate", "addmm", "mul"}


@pytest.fixture(scope="module")
def described() -> Mapping[str, Any]:
    if compiler() is None:
        pytest.skip("there is no C++ compiler to build the device that computes nothing")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    script = str(Path(__file__).with_name("step_operators.py"))
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=500, env=environment)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("preset", KERNELS)
def test_a_block_launches_few_kernels(preset: str, described: Mapping[str, Any]) -> None:
    first, further = (described[preset][name] for name in ("first", "further"))
    assert sum(first.values()) <= KERNELS[preset][0], first
    assert sum(further.values()) <= KERNELS[preset][1], further


@pytest.mark.parametrize("preset", KERNELS)
def test_only_sums_and_states_are_fp32(preset: str, described: Mapping[str, Any]) -> None:
    assert set(described[preset]["wide"]) == WIDE
