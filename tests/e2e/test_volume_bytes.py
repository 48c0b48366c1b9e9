"""What a run moves on a volume, as the kernel counts it at the volume's block device, beside what the plan says. Needs
root."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny import write_corpus
from tools.bench.volumes import volumes

# 23M parameters: a step reads and writes some hundreds of MB, beside which the file system's own blocks are few.
RECIPE = """
model: {{family: gpt2, layers: 6, hidden: 512, heads: 8, vocab: 4096, positions: 64}}
data: {{path: {folder}/set, sequence_length: 64, split: [1, 0, 0]}}
train: {{steps: 8, global_batch: 2, microbatch: 1, eval_every: 0}}
optimizer: {{warmup: 2}}
offload: {{paths: [{volume}]}}
logging: {{every: 1, dir: {folder}/runs}}
"""
STATES = ("offload.optimizer=nvme",)
ALL = (*STATES, "offload.parameters=nvme", "offload.gradients=nvme")
ACTIVATIONS = (*STATES, "offload.activations=nvme", "activation_checkpointing=full")
# Bytes in a sector of the kernel's counts, whatever the device's own.
SECTOR = 512
TOLERANCE = 1e-3

pytestmark = [pytest.mark.root, pytest.mark.soak]


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    try:
        with volumes([2 * 2**30], str(tmp_path_factory.mktemp("devices"))) as (made,):
            yield made
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"file systems cannot be mounted here: {error}")


def llmtrain(*words: object) -> str:
    return subprocess.run(
        [sys.executable, "-m", "llmtrain", *map(str, words)], check=True, capture_output=True, text=True
    ).stdout


def moved(volume: Path) -> tuple[int, int]:
    """Return the bytes that were read from and written to a volume's device."""
    os.sync()
    device = os.stat(volume).st_dev
    counts = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    return int(counts[2]) * SECTOR, int(counts[6]) * SECTOR


@pytest.mark.parametrize("keys", [STATES, ALL, ACTIVATIONS], ids=["states", "all", "activations"])
def test_the_device_counts_what_is_planned(keys: tuple[str, ...], volume: Path, tmp_path: Path) -> None:
    """The difference of two runs is that of their steps: starts and ends are alike."""
    write_corpus(tmp_path / "set", 3000)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path, volume=volume))
    counted = []
    for steps in (3, 8):
        before = moved(volume)
        llmtrain("run", recipe, f"name=of-{steps}", f"train.steps={steps}", *keys)
        counted.append([now - then for now, then in zip(moved(volume), before, strict=True)])
    planned = json.loads(llmtrain("plan", recipe, "--json", *keys))["moved"]["volumes"]
    assert ("activations" in planned) == ("offload.activations=nvme" in keys)
    for way, (few, many) in enumerate(zip(*counted, strict=True)):
        step = sum(purpose[str(volume)][way] for purpose in planned.values())
        assert step > 0
        assert (many - few) / 5 == pytest.approx(step, rel=TOLERANCE), (way, step, few, many)
