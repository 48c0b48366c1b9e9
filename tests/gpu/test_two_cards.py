"""Two ranks, each on a GPU of its own, train as one process on a CPU does. One case also runs on CPUs, so that the test
itself is known to work."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.tiny import Curve, curve, last_step, write_corpus

STEPS = 6
RECIPE = """
name: tiny
model: {{family: llama, layers: 4, hidden: 32, heads: 4, kv_heads: 2, ffn: 96, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: {steps}, global_batch: 8, microbatch: 1, eval_every: 3, eval_batches: 1, compile: false}}
precision: {{compute: fp32}}
optimizer: {{lr: 1.0e-2, warmup: 2}}
checkpoint: {{every: 3}}
logging: {{every: 1, dir: {folder}/runs}}
"""
PIPELINE = "parallel.pipeline=2"
CASES = {
    "stage 1": ("zero.stage=1",),
    "stage 3": ("zero.stage=3",),
    "stage 1, registered": ("zero.stage=1", "zero.registered=true"),
    "stage 3, registered": ("zero.stage=3", "zero.registered=true"),
    "states on the host": ("zero.stage=2", "offload.optimizer=host", "offload.share=0.5", "offload.bucket=2048"),
    "tensor": ("parallel.tensor=2",),
    "tensor and sequence": ("parallel.tensor=2", "parallel.sequence=true"),
    "1f1b": (PIPELINE,),
    "interleaved": (PIPELINE, "pipeline.schedule=interleaved"),
    "zero-bubble": (PIPELINE, "pipeline.schedule=zero-bubble"),
    "zero-bubble-v": (PIPELINE, "pipeline.schedule=zero-bubble-v"),
    "message-driven": (PIPELINE, "pipeline.schedule=message-driven"),
}
# Seconds after which a rank that does not answer ends the run, and more for what follows.
TIMEOUT, MARGIN = 12, 20
LOST = {"kill": r"rank \d was killed by SIGKILL on ", "suspend": r"rank \d on .* has not answered for "}
# Of cards without multicast, such as an A100: `zero.registered` needs it.
NO_ALLOCATOR = "NCCL has no allocator for this GPU"
NO_CARD = pytest.mark.skipif(torch.cuda.is_available(), reason="runs where there is no GPU")
CARDS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def trained(folder: Path, name: str, ranks: int, gpus: bool, *keys: str) -> Curve:
    """Train the recipe on ranks of their own; return the losses."""
    words = ["run", str(folder / "tiny.yaml"), f"name={name}", "--nproc", str(ranks), *keys]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "llmtrain", *words]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    if ran.returncode and NO_ALLOCATOR in ran.stderr:
        pytest.skip(NO_ALLOCATOR)
    assert ran.returncode == 0, ran.stderr
    # Nothing of torch's or NCCL's comes between the run's own lines.
    assert "Warning" not in ran.stderr, ran.stderr
    return curve(folder / "runs" / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and its data."""
    made = tmp_path_factory.mktemp("cards")
    write_corpus(made / "set", 100)
    (made / "tiny.yaml").write_text(RECIPE.format(folder=made, steps=STEPS))
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> Curve:
    """The losses of one process on a CPU."""
    return trained(folder, "expected", 1, False)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("case", "gpus"),
    [
        # tests/e2e has the same on CPUs.
        pytest.param("stage 3", False, marks=[NO_CARD, pytest.mark.soak]),
        *(pytest.param(case, True, marks=CARDS) for case in CASES),
    ],
)
def test_two_ranks_have_the_curve_of_one(case: str, gpus: bool, folder: Path, expected: Curve) -> None:
    found = trained(folder, f"{case} {gpus}".replace(" ", "-"), 2, gpus, *CASES[case])
    assert found.keys() == expected.keys()
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-4)


@CARDS
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", ["zero-bubble-v", "breadth-first"])
def test_large_messages_do_not_hang_the_first_step(schedule: str, folder: Path) -> None:
    """Of 32 MiB, which NCCL's buffers do not hold, so that a send ends only with its receive."""
    wide = ("model.hidden=4096", "model.heads=32", "model.kv_heads=32", "train.microbatch=128")
    keys = (*wide, "train.global_batch=512", "train.steps=3", "optimizer.lr=1.0e-4")
    one = trained(folder, f"{schedule}-one", 1, True, *keys)
    found = trained(folder, f"{schedule}-large", 2, True, *keys, PIPELINE, f"pipeline.schedule={schedule}")
    assert list(found.values()) == pytest.approx(list(one.values()), rel=1e-4)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "case", "gpus"),
    [
        pytest.param("kill", "stage 3", False, marks=NO_CARD),
        *(
            pytest.param(fault, case, True, marks=CARDS)
            for fault in LOST
            for case in ("stage 3", "1f1b", "message-driven")
        ),
    ],
)
def test_a_lost_rank_ends_the_run(fault: str, case: str, gpus: bool, folder: Path) -> None:
    """In one sentence, while the other rank waits for it."""
    name = f"{fault} {case} {gpus}".replace(" ", "-")
    words = [sys.executable, "-m", "llmtrain", "run", str(folder / "tiny.yaml"), f"name={name}", "--nproc", "2"]
    keys = ["train.steps=100000", f"train.timeout={TIMEOUT}", *CASES[case]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [*words, *keys], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        while last_step(folder / "runs" / name) < 20:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        ranks = psutil.Process(process.pid).children()
        getattr(ranks[-1], fault)()
        struck = time.monotonic()
        _, errors = process.communicate(timeout=280)
        assert time.monotonic() - struck < TIMEOUT + MARGIN
    assert process.returncode == 1, errors
    (said,) = [line for line in errors.splitlines() if line.startswith("llmtrain:")]
    assert re.search(LOST[fault], said), said
    _, left = psutil.wait_procs(ranks, timeout=5)
    assert not left


@CARDS
@pytest.mark.timeout(600)
def test_each_rank_takes_memory_of_its_own_card_alone(folder: Path) -> None:
    """As nvidia-smi lists the processes of each card, while they train."""
    words = [sys.executable, "-m", "llmtrain", "run", str(folder / "tiny.yaml"), "--nproc", "2"]
    keys = ["name=long", "train.steps=100000", "zero.stage=2", "offload.optimizer=host", "checkpoint.every=20"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([*words, *keys], stdout=subprocess.DEVNULL, env=environment) as process:
        try:
            log = folder / "runs" / "long" / "metrics.jsonl"
            while not log.exists() or len(log.read_text().splitlines()) < 50:
                assert process.poll() is None
                time.sleep(0.2)
            query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
            apps = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
        finally:
            process.terminate()
    if len(apps) < 2:
        pytest.skip("nvidia-smi lists no processes here, such as in a container")
    by_process = [line.split(", ")[1] for line in apps]
    assert len(by_process) == len(set(by_process)), apps
