"""The peak of a GPU's memory in a step is at most what is planned, and not much less."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.fake_cuda.library import compiler

SETTINGS = {
    "nothing recomputed": ("activation_checkpointing=none",),
    "fully recomputed": ("activation_checkpointing=full",),
    "groups recomputed": ("activation_checkpointing={every: 3}",),
    "one sequence": ("activation_checkpointing=none", "train.microbatch=1"),
    "sums in bf16": ("activation_checkpointing=none", "precision.gradients=compute"),
    "dropout": ("activation_checkpointing=full", "model.dropout=0.1"),
    "fp32": ("activation_checkpointing=none", "precision.compute=fp32"),
    # A block's backward pass takes most, and not the loss.
    "many sequences": ("activation_checkpointing=full", "train.microbatch=64", "train.global_batch=64"),
    "many sequences, nothing recomputed": (
        "activation_checkpointing=none",
        "train.microbatch=64",
        "train.global_batch=64",
    ),
}
PRESETS = ("gpt2-124m", "llama3.2-1b", "pythia-160m")
CASES = {(preset, name): keys for preset in PRESETS for name, keys in SETTINGS.items()}
# Ids of tokens, tables and statistics are not planned.
SMALL = 2**20
Peaks = Callable[[str, str], dict[str, int]]


@pytest.fixture(scope="module")
def peaks() -> Peaks:
    """The planned and the counted bytes of each case."""
    if compiler() is None:
        pytest.skip("there is no C++ compiler to build the device that computes nothing")
    given = [
        (preset, f"model={{preset: {preset}, positions: 1024, layers: 6}}", "train.global_batch=8",
         "train.microbatch=4", *keys)
        for (preset, _), keys in CASES.items()
    ]  # fmt: skip
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    script = str(Path(__file__).with_name("step_peak.py"))
    command = [sys.executable, script, json.dumps(given)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    found = dict(zip(CASES, json.loads(ran.stdout), strict=True))
    return lambda preset, name: found[preset, name]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_plan_holds(preset: str, name: str, peaks: Peaks) -> None:
    planned, counted = peaks(preset, name)["planned"], peaks(preset, name)["counted"]
    assert 0.95 * planned <= counted <= planned + SMALL
