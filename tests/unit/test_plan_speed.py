"""Plans of the largest runs take at most some seconds of a processor, from the start of the command to its end."""

import compileall
import resource
import subprocess
import sys
from pathlib import Path

import llmtrain
import llmtrain_data
import llmtrain_kernels
import pytest

CLUSTER = (
    "{accelerator: {name: A100-80GB, memory: 80GB, bandwidth: 2TB/s}, node: {ranks: 8}, clusters: ["
    "{name: a, nodes: %d, nic: {kind: infiniband, bandwidth: 1600Gbit/s}}, "
    "{name: b, nodes: %d, nic: {kind: roce, bandwidth: 1600Gbit/s}}], "
    "between: {kind: ethernet, bandwidth: 100Gbit/s}}"
)
MODELS = {
    1024: "{preset: gpt3-175b}",
    16384: "{family: gpt2, layers: 128, hidden: 25600, heads: 160, vocab: 51200}",  # 1T
}
PIPELINE = {1024: 16, 16384: 64}
MICROBATCHES, SECONDS = 512, 2.0
CASES = [
    ("plan", 1024, ()),
    ("plan", 16384, ()),
    ("plan", 16384, ("pipeline.schedule=zero-bubble-v", "zero.stage=0", "cluster.accelerator.memory=141GB")),
    ("plan", 16384, ("offload.activations=host",)),
    ("plan", 1024, ("zero.stage=3",)),
    ("plan", 16384, ("zero.stage=3",)),
    ("plan", 16384, ("zero.stage=3", "zero.resident=3GB")),
    # Memory for some of the weights, so that ways to fill it are compared.
    ("plan", 1024, ("zero.stage=3", "cluster.accelerator.memory=18GB")),
    # Nothing fits, so that all changes are planned.
    ("plan", 16384, ("zero.stage=0", "cluster.accelerator.memory=5GB", "--force")),
    ("cluster show", 16384, ()),
    ("cluster show", 16384, ("parallel.pipeline=1",)),
    ("cluster show", 16384, ("parallel.order=data-pipeline-tensor",)),
]


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    """Compile the packages to bytecode, as pip does where it installs them."""
    for package in (llmtrain, llmtrain_data, llmtrain_kernels):
        compileall.compile_dir(package.__path__[0], quiet=1)


@pytest.mark.soak  # It measures time.
@pytest.mark.parametrize(("asked", "ranks", "keys"), CASES)
def test_large_runs_are_planned_quickly(asked: str, ranks: int, keys: tuple[str, ...], tmp_path: Path) -> None:
    pipeline = PIPELINE[ranks]
    (tmp_path / "large.yaml").write_text(
        f"model: {MODELS[ranks]}\n"
        "data: {path: set, sequence_length: 2048}\n"
        f"train: {{global_batch: {MICROBATCHES * ranks // 8 // pipeline}, microbatch: 1}}\n"
        f"parallel: {{tensor: 8, pipeline: {pipeline}}}\n"
        "zero: {stage: 1}\n"
        "activation_checkpointing: full\n"
        f"cluster: {CLUSTER % (ranks // 16, ranks // 16)}\n"
    )
    before = processor_seconds()
    command = [sys.executable, "-m", "llmtrain", *asked.split(), "large.yaml", *keys, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert f'"ranks": {ranks}' in done.stdout
    assert processor_seconds() - before < SECONDS


@pytest.mark.soak
def test_states_in_many_buckets_are_planned_quickly(tmp_path: Path) -> None:
    """40B of states in 146,000 buckets, of which as many leave as must, and which 16 microbatches read and write."""
    before = processor_seconds()
    command = [sys.executable, "-m", "llmtrain", "plan", "offload-llama-40b", "data.path=set", "data.tokenizer=null"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert processor_seconds() - before < 3
