"""While a checkpoint of states in files is written, it takes the memory of one block, whatever the model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import write_corpus

# 60M parameters: fp32 masters and moments take 0.72 GB.
RECIPE = """
name: saved
model: {{family: gpt2, layers: 8, hidden: 768, heads: 12, vocab: 4096, positions: 128}}
data: {{path: {folder}/set, sequence_length: 128, split: [1, 0, 0]}}
train: {{steps: 3, global_batch: 2, microbatch: 1, eval_every: 0, compare_every: 0}}
precision: {{compute: bf16}}
optimizer: {{warmup: 1}}
checkpoint: {{every: 2, async: {asynchronous}}}
offload: {{optimizer: nvme, paths: [{folder}]}}
logging: {{dir: {folder}/runs}}
"""
# Prints how far the process's peak rises over what it holds when a save begins, until the save has ended.
RUN = """
import sys
from pathlib import Path
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.cli.main import main

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10

def measured(self, *given):
    before = status("VmRSS")
    # Let the peak begin anew.
    Path("/proc/self/clear_refs").write_text("5")
    failure = save(self, *given)
    self._idle.wait()
    print("rise", status("VmHWM") - before, file=sys.stderr)
    return failure

save, Checkpointer.save = Checkpointer.save, measured
sys.exit(main(sys.argv[1:]))
"""
# A block of 16 MiB on its way from one file to the other, a bucket's part of it, and what Python takes.
ROOM = 24 * 2**20


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_save_takes_one_block(asynchronous: str, tmp_path: Path) -> None:
    write_corpus(tmp_path / "set", 200)
    (tmp_path / "r.yaml").write_text(RECIPE.format(folder=tmp_path, asynchronous=asynchronous))
    # Freed memory goes back to the system, so that a save cannot take it again unseen.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_ARENA_MAX": "1"}
    words = [sys.executable, "-c", RUN, "run", str(tmp_path / "r.yaml"), "--nproc", "1"]
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    rises = [int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("rise ")]
    assert len(rises) >= 2
    assert max(rises) < ROOM, rises
