"""`llmtrain run` on the nodes of an emulated cluster trains the same curve as one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import curve, write_corpus
from tools.netlab.lab import Lab

pytestmark = pytest.mark.netlab

RECIPE = """
name: {name}
model: {{family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: 12, global_batch: 8, microbatch: 1, eval_every: 4}}
optimizer: {{lr: 1.0e-2, warmup: 4}}
logging: {{every: 1, dir: {folder}}}
"""


def command(folder: Path, name: str) -> list[str]:
    """Write a recipe, and return the command that trains it."""
    path = folder / f"{name}.yaml"
    path.write_text(RECIPE.format(name=name, folder=folder))
    return [sys.executable, "-m", "llmtrain", "run", str(path)]


def test_two_nodes_train_as_one_process_does(lab: Lab, tmp_path: Path) -> None:
    write_corpus(tmp_path / "set", 100)

    result = lab.run(command(tmp_path, "nodes"), timeout=300)
    assert result.returncode == 0, result.output
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command(tmp_path, "alone"), "--nproc", "1"], env=alone, capture_output=True, check=True)

    expected = curve(tmp_path / "alone")
    assert len(expected) >= 15
    assert expected["eval", 12] < expected["eval", 0] - 0.2
    assert curve(tmp_path / "nodes") == pytest.approx(expected, rel=1e-5)
    parameters = json.loads((tmp_path / "nodes" / "run.json").read_text())["parameters"]
    # Each step's gradients cross the link, with 4 bytes per element.
    assert min(result.sent(0), result.sent(1)) > 12 * 4 * parameters
