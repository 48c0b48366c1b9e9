"""`llmtrain run` on the nodes of an emulated cluster: the same curve as one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llmtrain_data.indexed import IndexedWriter

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
    """Write a recipe and return what trains it."""
    path = folder / f"{name}.yaml"
    path.write_text(RECIPE.format(name=name, folder=folder))
    return [sys.executable, "-m", "llmtrain", "run", str(path)]


def curve(folder: Path) -> dict[tuple[str, int], float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(row.get("event", "step"), row["step"]): row["loss"] for row in rows if row.get("event") != "end"}


def test_two_nodes_train_as_one_process_does(lab: Lab, tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "set", np.dtype(np.uint16))
    steps = np.random.default_rng(0).integers(1, 4, size=(100, 100))
    for document in np.cumsum(steps, axis=1) % 64:
        writer.add(document, np.array([100]))
    writer.commit()

    result = lab.run(command(tmp_path, "nodes"), timeout=300)
    assert result.returncode == 0, result.output
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command(tmp_path, "alone"), "--nproc", "1"], env=alone, capture_output=True, check=True)

    expected = curve(tmp_path / "alone")
    assert len(expected) >= 15
    assert expected["eval", 12] < expected["eval", 0] - 0.2
    assert curve(tmp_path / "nodes") == pytest.approx(expected, rel=1e-5)
    parameters = json.loads((tmp_path / "nodes" / "run.json").read_text())["parameters"]
    # Each step's gradients have crossed the link, 4 bytes each.
    assert min(result.sent(0), result.sent(1)) > 12 * 4 * parameters
