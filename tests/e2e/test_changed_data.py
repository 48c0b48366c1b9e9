"""Data that is damaged before or during `llmtrain run`: one sentence, exit code 2."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from llmtrain_data.checksums import CHECKSUM_BLOCK

from tests.tiny import write_corpus

RECIPE = """
name: tiny
model: {{family: llama, layers: 1, hidden: 16, heads: 2, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: {steps}, global_batch: 64, microbatch: 16, eval_every: 0}}
optimizer: {{lr: 1.0e-3, warmup: 1}}
checkpoint: {{every: 2}}
logging: {{every: 1, dir: {folder}/runs}}
"""
LONG = 10**6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A set of four blocks, and a recipe for it."""
    write_corpus(tmp_path / "set", 1200)
    return tmp_path


def start(folder: Path, ranks: int, steps: int) -> subprocess.Popen[str]:
    path = folder / "tiny.yaml"
    path.write_text(RECIPE.format(folder=folder, steps=steps))
    command = [sys.executable, "-m", "llmtrain", "run", str(path), "--nproc", str(ranks)]
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def steps_done(folder: Path) -> int:
    path = folder / "runs" / "tiny" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def flip(folder: Path, chance: random.Random) -> str:
    """Change a bit, or a byte, in place, and return the error that a run must report."""
    content = np.memmap(folder / "set.bin", np.uint8, mode="r+")
    place = chance.randrange(len(content))
    content[place] ^= 1 << chance.randrange(8) if chance.randrange(2) else chance.randrange(1, 256)
    content.flush()
    first = place // CHECKSUM_BLOCK * CHECKSUM_BLOCK
    return (
        f"set.bin does not match its checksums in bytes {first} to {min(first + CHECKSUM_BLOCK, len(content))}; it was"
    )


def turn_round(folder: Path, chance: random.Random) -> str:
    """Reverse all tokens in place, so that each rank finds other damage, and return the error that a run must
    report."""
    content = np.memmap(folder / "set.bin", np.uint16, mode="r+")
    content[:] = content[::-1].copy()
    content.flush()
    return "set.bin does not match its checksums in bytes"


def assert_said(process: subprocess.Popen[str], sentence: str) -> None:
    _, errors = process.communicate(timeout=120)
    assert sentence in errors
    assert len(errors.splitlines()) == 1, errors
    assert process.returncode == 2


@pytest.mark.parametrize(
    ("ranks", "damage", "times"),
    [(1, flip, 1), (2, turn_round, 1), pytest.param(1, flip, 20, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
    ids=["one", "two", "many"],
)
def test_damage_under_a_run_ends_it_and_stops_the_next(
    folder: Path, ranks: int, damage: Callable[[Path, random.Random], str], times: int
) -> None:
    whole, chance = (folder / "set.bin").read_bytes(), random.Random(times)
    for _ in range(times):
        before = steps_done(folder)
        process = start(folder, ranks, LONG)
        deadline = time.monotonic() + 120
        while steps_done(folder) < before + 5:
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        sentence = damage(folder, chance)
        assert_said(process, sentence)
        assert_said(start(folder, ranks, LONG), sentence)
        (folder / "set.bin").write_bytes(whole)
