"""A rank that is killed during a save ends the run as soon as one that is killed at any other time."""

import getpass
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.tiny import write_corpus

RECIPE = """
name: tiny
model: {{family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: 100000, global_batch: 12, microbatch: 1, eval_every: 0, compare_every: 0}}
optimizer: {{lr: 1.0e-2, warmup: 5}}
checkpoint: {{every: 5}}
logging: {{every: 1, dir: {folder}/runs}}
"""
# Seconds that each rank needs to write its shard file.
SLOW = 2.0
CUSTOM = f"""
import os, time
fsync = os.fsync

def slow(file):
    if os.readlink(f"/proc/self/fd/{{file}}").endswith(".safetensors"):
        time.sleep({SLOW})
    fsync(file)

os.fsync = slow
"""
# Seconds within which all processes must end.
LIMIT = 8.0


def kill_in_save(folder: Path, ranks: int, victim: int, delay: float, *overrides: str) -> None:
    """Start a run, and kill a rank `delay` seconds after it has begun to write its shard file of the first
    checkpoint."""
    write_corpus(folder / "set", 100)
    (folder / "tiny.yaml").write_text(RECIPE.format(folder=folder))
    for name in ("custom", "tmp"):
        (folder / name).mkdir()
    (folder / "custom" / "sitecustomize.py").write_text(CUSTOM)
    paths = os.pathsep.join([str(folder / "custom"), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-m", "llmtrain", "run", str(folder / "tiny.yaml"), "--nproc", str(ranks), *overrides],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "TMPDIR": str(folder / "tmp")},
    )  # fmt: skip
    part = folder / "runs" / "tiny" / "checkpoints" / "step-00000005.partial" / f"rank-{victim:05d}.safetensors"
    while not part.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    time.sleep(delay)
    children = psutil.Process(process.pid).children()
    (killed,) = [child for child in children if child.environ().get("RANK") == str(victim)]
    killed.kill()
    begin = time.monotonic()
    _, errors = process.communicate(timeout=120)
    took = time.monotonic() - begin
    said = [line for line in errors.splitlines() if line.startswith("llmtrain:")]
    print(f"{ranks} ranks, {overrides}: rank {victim} killed after {delay:.2f} s, {took:.1f} s, {said}")
    assert process.returncode == 1
    assert len(said) == 1, errors
    assert re.search(rf"rank {victim} was killed by SIGKILL on .* after step \d+, in .*, so the run stopped; ", said[0])
    assert "Traceback" not in errors
    assert took < LIMIT
    assert not [child for child in children if child.is_running()]
    # torch keeps this folder for all runs of a user.
    assert set(os.listdir(folder / "tmp")) <= {f"torchinductor_{getpass.getuser()}"}
    if victim != 0:
        end = json.loads((folder / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()[-1])
        assert (end["event"], end["outcome"]) == ("end", "failed")


@pytest.mark.parametrize(
    ("ranks", "victim", "overrides"),
    [(2, 0, ("checkpoint.async=false", "train.timeout=20")), (3, 1, ("checkpoint.async=true", "train.timeout=600"))],
)
def test_a_rank_killed_while_it_saves(tmp_path: Path, ranks: int, victim: int, overrides: tuple[str, ...]) -> None:
    kill_in_save(tmp_path, ranks, victim, 0.5, *overrides)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(20))
def test_ranks_killed_while_they_save(tmp_path: Path, number: int) -> None:
    """Every second case saves synchronously; with a short and a long timeout."""
    chance = random.Random(number)
    ranks = chance.choice([2, 3, 4])
    saving = f"checkpoint.async={'true' if number % 2 else 'false'}"
    timeout = f"train.timeout={20 if number % 4 < 2 else 600}"
    victim = 0 if number % 3 == 0 else chance.randrange(ranks)
    kill_in_save(tmp_path, ranks, victim, chance.uniform(0, SLOW), saving, timeout)
