"""Offload saves memory that the kernel counts: the same run fits a memory limit with states, or activations, in files,
and is killed without. Needs root and the memory controller of cgroup v1."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiny import write_corpus

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
# Each of the inputs of 24 groups takes 16 MiB.
DEEP = """
model: {{family: gpt2, layers: 24, hidden: 64, heads: 2, vocab: 512, positions: 256}}
data: {{path: {folder}/set, sequence_length: 256, split: [1, 0, 0]}}
train: {{steps: 1, global_batch: 256, microbatch: 256, eval_every: 0}}
optimizer: {{warmup: 1}}
activation_checkpointing: full
checkpoint: {{async: false}}
logging: {{every: 1, dir: {folder}/runs}}
"""
# 521M parameters. In fp32: weights, gradients and both moments take 8.3 GB, and checkpoints 6.3 GB.
LARGE = """
model: {{family: gpt2, layers: 36, hidden: 1024, heads: 16, vocab: 32768, positions: 256, tie_embeddings: false}}
data: {{path: {folder}/set, sequence_length: 256, split: [1, 0, 0]}}
train: {{steps: 5, global_batch: 1, microbatch: 1, eval_every: 0}}
optimizer: {{warmup: 2}}
activation_checkpointing: full
checkpoint: {{async: false}}
cluster: {{accelerator: {{memory: 1400MiB}}, node: {{ranks: 1}}}}
logging: {{every: 1, dir: {folder}/runs}}
"""
# 1.54B parameters: weights, gradients and both moments take 24.7 GB, and a checkpoint 18.5 GB.
LARGER = ("model.layers=28", "model.hidden=2048", "train.steps=1", "optimizer.warmup=1")
OFFLOAD = ("offload.optimizer=nvme", "offload.paths=[.]")
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


@pytest.fixture
def limited(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A memory group, which holds what a process takes and the pages of its files: of 1 GiB, or as many bytes as the
    test asks for."""
    group = GROUPS / f"test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(getattr(request, "param", 2**30)))
    except OSError as error:
        pytest.skip(f"memory cannot be limited here: {error}")
    yield group
    group.rmdir()


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(limited: Path, tmp_path: Path) -> Run:
    """Run a recipe within the group, as a run of the given name."""
    write_corpus(tmp_path / "set", 3000)

    def inside(recipe: str, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "r.yaml").write_text(recipe.format(folder=tmp_path))
        words = [sys.executable, "-m", "llmtrain", "run", str(tmp_path / "r.yaml"), f"name={name}", *overrides]
        grouped = ["sh", "-c", f'echo $$ > {limited}/cgroup.procs && exec "$@"', "sh", *words]
        return subprocess.run(grouped, capture_output=True, text=True, timeout=2400, check=False)

    return inside


def refuses(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, "but this machine has 1.00 GiB" in done.stderr) == (2, True)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_states_in_files_fit_a_limit(run: Run, tmp_path: Path) -> None:
    refuses(run(RECIPE, "beside"))
    beside = run(RECIPE, "beside", "--force")
    assert beside.returncode in KILLED, beside.stderr
    offloaded = run(RECIPE, "offloaded", *OFFLOAD)
    assert offloaded.returncode == 0, offloaded.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs/offloaded/metrics.jsonl").read_text().splitlines()]
    moved = rows[2]["offload"]["read_bytes"]["."]
    assert 2 * 4 * 59_900_000 < moved < 2 * 4 * 60_100_000
    assert [*(tmp_path / "runs/offloaded/checkpoints").glob("step-00000004/manifest.json")]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_activations_in_files_fit_a_limit(run: Run, tmp_path: Path) -> None:
    """The process takes what is planned."""
    refuses(run(DEEP, "beside"))
    beside = run(DEEP, "beside", "--force")
    assert beside.returncode in KILLED, beside.stderr
    offloaded = run(DEEP, "offloaded", "offload.activations=nvme", "offload.paths=[.]")
    assert offloaded.returncode == 0, offloaded.stderr
    step, end = (json.loads(line) for line in (tmp_path / "runs/offloaded/metrics.jsonl").read_text().splitlines())
    assert step["offload"]["activations"]["read_bytes"]["."] == 22 * 2**24
    assert end["planned"]["memory_bytes"] == pytest.approx(end["measured"]["memory_bytes"], abs=2**26)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("limited", "keys", "steps"),
    [(3 * 2**29, (), 5), (6 * 2**30, (*LARGER, "cluster.accelerator.memory=5900MiB"), 1)],
    indirect=["limited"],
    ids=["1.5 GiB", "6 GiB"],
)
def test_a_model_of_several_times_the_memory_trains(
    run: Run, tmp_path: Path, keys: tuple[str, ...], steps: int
) -> None:
    """The plan refuses the same recipe without offload; forced, the kernel kills it."""
    refused = run(LARGE, "beside", *keys)
    assert (refused.returncode, "more than cluster.accelerator.memory" in refused.stderr) == (2, True)
    assert run(LARGE, "beside", *keys, "--force").returncode in KILLED
    offloaded = run(LARGE, "offloaded", *keys, *OFFLOAD, "offload.parameters=nvme")
    assert offloaded.returncode == 0, offloaded.stderr
    assert [*(tmp_path / "runs/offloaded/checkpoints").glob(f"step-{steps:08}/manifest.json")]
