"""Offload saves memory that the kernel counts: the same run fits a memory limit with states in files, and is killed
without. Needs root and the memory controller of cgroup v1."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import write_corpus

GROUPS = Path("/sys/fs/cgroup/memory")
# 60M parameters. In fp32: weights and gradients take 0.48 GB, and both moments as much again.
RECIPE = """
model: {{family: gpt2, layers: 8, hidden: 768, heads: 12, vocab: 4096, positions: 128}}
data: {{path: {folder}/set, sequence_length: 128, split: [1, 0, 0]}}
train: {{steps: 4, global_batch: 2, microbatch: 1, eval_every: 0}}
optimizer: {{warmup: 2}}
checkpoint: {{async: false}}
logging: {{every: 1, dir: {folder}/runs}}
"""
OFFLOAD = ("offload.optimizer=nvme", "offload.paths=[.]")


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory group of 1 GiB, which holds what a process takes and the pages of its files."""
    group = GROUPS / f"test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(2**30))
    except OSError as error:
        pytest.skip(f"memory cannot be limited here: {error}")
    yield group
    group.rmdir()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_states_in_files_fit_a_limit(limited: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "set", 200)
    (tmp_path / "r.yaml").write_text(RECIPE.format(folder=tmp_path))

    def run(name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "llmtrain", "run", str(tmp_path / "r.yaml"), f"name={name}", *overrides]
        inside = ["sh", "-c", f'echo $$ > {limited}/cgroup.procs && exec "$@"', "sh", *words]
        return subprocess.run(inside, capture_output=True, text=True, timeout=600, check=False)

    beside = run("beside")
    assert beside.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), beside.stderr
    offloaded = run("offloaded", *OFFLOAD)
    assert offloaded.returncode == 0, offloaded.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs/offloaded/metrics.jsonl").read_text().splitlines()]
    moved = rows[2]["offload"]["read_bytes"]["."]
    assert 2 * 4 * 59_900_000 < moved < 2 * 4 * 60_100_000
    assert [*(tmp_path / "runs/offloaded/checkpoints").glob("step-00000004/manifest.json")]
