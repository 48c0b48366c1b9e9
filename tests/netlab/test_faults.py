"""A node that drops off the network: both sides stop in time and report it, and the same command resumes."""

import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.tiny import last_step, write_corpus
from tools.netlab.lab import Lab, LabResult
from tools.netlab.network import node_name
from tools.netlab.spec import plain

pytestmark = pytest.mark.netlab

RECIPE = """
name: {name}
model: {{family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: {steps}, global_batch: 8, microbatch: 1, eval_every: 0, timeout: {timeout}}}
optimizer: {{lr: 1.0e-2, warmup: 4}}
checkpoint: {{every: 10}}
logging: {{every: 1, dir: {folder}}}
"""
# The recipe's timeout, and the further seconds that a busy machine may take.
TIMEOUT, MARGIN = 12, 8


def command(folder: Path, name: str, steps: int, *keys: str) -> list[str]:
    path = folder / f"{name}.yaml"
    path.write_text(RECIPE.format(name=name, folder=folder, steps=steps, timeout=TIMEOUT))
    return [sys.executable, "-m", "llmtrain", "run", str(path), *keys]


def cut_off(lab: Lab, words: list[str], folder: Path, goal: int) -> tuple[LabResult, float]:
    """Run, disconnect the second node after step `goal`, and connect it again when the run has ended."""
    struck, over = 0.0, threading.Event()

    def link(state: str) -> None:
        subprocess.run(["ip", "-n", node_name(lab.name, 1), "link", "set", "eth0", state], check=True)

    def cut() -> None:
        nonlocal struck
        while last_step(folder) < goal:
            if over.wait(0.02):
                return
        struck = time.monotonic()
        link("down")

    cutting = threading.Thread(target=cut)
    cutting.start()
    try:
        result = lab.run(words, timeout=150)
    finally:
        ended = time.monotonic()
        over.set()
        cutting.join()
        link("up")
    assert struck, f"the run ended before step {goal}: {result.output}"
    return result, ended - struck


def suffer(folder: Path, cuts: int, *keys: str) -> None:
    write_corpus(folder / "set", 100)
    chance, steps = random.Random(0), 30 * (cuts + 1)
    with Lab(plain(nodes=2, ranks_per_node=2)) as lab:
        calm = lab.run(command(folder, "calm", steps, *keys), timeout=150)
        assert calm.returncode == 0, calm.output
        words = command(folder, "harmed", steps, *keys)
        for _ in range(cuts):
            result, took = cut_off(lab, words, folder / "harmed", last_step(folder / "harmed") + chance.randint(1, 40))
            assert took < TIMEOUT + MARGIN
            assert result.returncode == 1
            # Each side reports it once.
            said = [line for lines in result.output for line in lines if line.startswith("llmtrain:")]
            assert len(said) == 2, said
            assert all(
                re.search(r"rank [023].* on node[01].* not answered .* after step \d+, in .+", line) for line in said
            )
            assert not any("Traceback" in line for lines in result.output for line in lines)
        last = lab.run(words, timeout=150)
        assert last.returncode == 0, last.output
    newest = [folder / name / "checkpoints" / f"step-{steps:08d}" for name in ("calm", "harmed")]
    weights = [{path.name: path.read_bytes() for path in place.glob("*.safetensors")} for place in newest]
    assert weights[0]
    assert weights[0] == weights[1]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("keys", [(), ("zero.stage=3",), ("parallel.tensor=2", "parallel.pipeline=2")], ids=" ".join)
def test_a_node_that_drops_off_again_and_again(keys: tuple[str, ...], tmp_path: Path) -> None:
    suffer(tmp_path, 3, *keys)
