"""A run is the same whoever starts its ranks or asks it to stop, and only one run at a time uses a folder."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from shutil import which

import pytest

from tests.tiny import Curve, curve, write_corpus

RECIPE = """
model: {{family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2, vocab: 64}}
data: {{path: {folder}/set, validation: {folder}/held-out, sequence_length: 16}}
train: {{steps: {steps}, global_batch: 8, microbatch: 1, eval_every: 10}}
parallel: {{tensor: 2}}
optimizer: {{lr: 1.0e-2, warmup: 5}}
logging: {{every: 1, dir: {folder}/runs}}
"""
TRAIN = ("-m", "llmtrain", "run")
AGENT = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TORCHRUN = (*AGENT, *TRAIN)
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, *TRAIN)
OURS = (sys.executable, *TRAIN, "--nproc", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small set whose tokens follow a pattern that a model can learn."""
    made = tmp_path_factory.mktemp("launchers")
    write_corpus(made / "set", 100)
    write_corpus(made / "held-out", 20)
    return made


def start(folder: Path, name: str, *command: str, steps: int = 20, override: str = "seed=1") -> subprocess.Popen[str]:
    """Start a recipe of that name with a command that takes the recipe and an override."""
    path = folder / f"{name}.yaml"
    path.write_text(RECIPE.format(folder=folder, steps=steps))
    return subprocess.Popen(
        [*command, str(path), override], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=180)
    return process.returncode, output, errors


def wait_for_step(folder: Path, name: str, step: int, process: subprocess.Popen[str]) -> None:
    while ("step", step) not in curve(folder / "runs" / name):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Curve:
    code, output, errors = end(start(folder, "ours", *OURS))
    assert code == 0, errors
    assert "2 ranks, started by llmtrain" in output
    return curve(folder / "runs" / "ours")


@pytest.mark.parametrize(
    ("by", "command"),
    [
        ("torchrun", TORCHRUN),
        pytest.param("mpirun", MPIRUN, marks=pytest.mark.skipif(which("mpirun") is None, reason="needs mpirun")),
    ],
)
def test_every_launcher_starts_the_same_run(folder: Path, reference: Curve, by: str, command: tuple[str, ...]) -> None:
    code, output, errors = end(start(folder, by, *command))
    assert code == 0, errors
    assert f"2 ranks, started by {by}" in output
    assert len(reference) == 23
    assert curve(folder / "runs" / by) == reference


def test_torchrun_starts_ranks_again(folder: Path) -> None:
    """Its store has what the ranks before have left there, and that they ended."""
    fails = (str(Path(__file__).with_name("fails_once.py")), "run")
    code, output, errors = end(start(folder, "again", *AGENT, "--max-restarts", "1", *fails, steps=8))
    assert code == 0, errors
    assert "ValueError: some bug" in errors
    assert output.count("2 ranks, started by torchrun") == 2
    assert ("step", 8) in curve(folder / "runs" / "again")


def test_torchrun_does_not_start_ranks_again_that_must_not_resume(folder: Path) -> None:
    agent = (*AGENT, "--max-restarts", "1", *TRAIN)
    code, _, errors = end(start(folder, "never", *agent, override="checkpoint.resume=never"))
    assert code == 1
    assert "but torchrun restarts lost ranks (--max-restarts), which resume from checkpoints; leave" in errors


def test_one_rank_of_a_launcher_says_what_is_wrong_with_a_recipe(folder: Path) -> None:
    code, _, errors = end(start(folder, "wrong", *TORCHRUN, override="train.steeps=1"))
    assert code == 1
    said = [line for line in errors.splitlines() if line.startswith("llmtrain:")]
    assert said == ["llmtrain: train.steeps is not a recipe key; did you mean train.steps?"]


def test_a_folder_has_one_run_at_a_time_and_usr1_stops_it(folder: Path) -> None:
    first = start(folder, "one", *OURS, steps=100_000)
    wait_for_step(folder, "one", 3, first)
    second = start(folder, "one", sys.executable, *TRAIN, steps=100_000, override="parallel.tensor=1")
    code, _, errors = end(second)
    assert code == 1
    (said,) = [line for line in errors.splitlines() if line.startswith("llmtrain:")]
    assert "runs/one is being trained in by process " in said
    first.send_signal(signal.SIGUSR1)
    code, _, errors = end(first)
    assert code == 75
    assert "stopped after step" in errors
    steps = [step for kind, step in curve(folder / "runs" / "one") if kind == "step"]
    assert steps == list(range(1, len(steps) + 1))
    saved = sorted((folder / "runs" / "one" / "checkpoints").iterdir())
    assert saved[-1].name == f"step-{steps[-1]:08d}"
    assert (folder / "runs" / "one" / "lock").read_text() == ""


CONTAINER = ("unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", "hostname $0; exec $*")


@pytest.mark.skipif(
    which("unshare") is None or subprocess.run([*CONTAINER, "here", "true"], capture_output=True).returncode != 0,
    reason="needs namespaces of its own",
)
def test_a_run_that_is_killed_in_one_container_goes_on_in_another(folder: Path) -> None:
    """The containers do not see each other's processes, and each has its own host name."""
    alone = (sys.executable, *TRAIN)
    first = start(folder, "moved", *CONTAINER, "one", *alone, steps=100_000, override="parallel.tensor=1")
    wait_for_step(folder, "moved", 3, first)
    code, _, errors = end(start(folder, "moved", *CONTAINER, "two", *alone, override="parallel.tensor=1"))
    assert code == 1
    assert "moved is being trained in by process 1 of " in errors
    first.kill()
    first.communicate()
    code, _, errors = end(start(folder, "moved", *CONTAINER, "three", *alone, override="parallel.tensor=1"))
    assert code == 0, errors
    (said,) = [line for line in errors.splitlines() if line.startswith("llmtrain:")]
    assert re.search(r"was last trained in by process 1 of .* on one, .*; waiting up to (5|6|7|8|9|10) s to see", said)
