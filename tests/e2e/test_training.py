"""`llmtrain run` on the command line: the same curve on any number of ranks, also after kills and stops."""

import fcntl
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny import Curve, curve, last_step, rows, write_corpus

RECIPE = """
name: {name}
model: {{family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2, vocab: 64}}
data: {{path: {data}, sequence_length: 16}}
train: {{steps: 20, global_batch: 8, microbatch: 1, eval_every: 5}}
optimizer: {{lr: 1.0e-2, warmup: 5}}
checkpoint: {{every: 4}}
logging: {{every: 1, dir: {runs}}}
"""
# Seconds within which a run must end after it has lost a rank.
LOST_RANK_SECONDS = 30


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small set whose tokens follow a pattern that a model can learn."""
    prefix = tmp_path_factory.mktemp("data") / "set"
    write_corpus(prefix, 200)
    return prefix


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE.format(name="tiny", data=corpus, runs=tmp_path / "runs"))
    return path


def command(recipe: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "llmtrain", "run", str(recipe), *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run(recipe: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(recipe, *arguments), capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    return done


def assert_same_curve(ours: Curve, theirs: Curve, rtol: float) -> None:
    assert ours.keys() == theirs.keys()
    assert len(ours) >= 20
    for key, loss in ours.items():
        assert loss == pytest.approx(theirs[key], rel=rtol), key


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run of one rank."""
    folder = tmp_path_factory.mktemp("reference")
    path = folder / "tiny.yaml"
    path.write_text(RECIPE.format(name="tiny", data=corpus, runs=folder))
    run(path)
    return folder / "tiny"


def test_loss_falls(reference: Path) -> None:
    losses = curve(reference)
    assert losses["eval", 20] < losses["eval", 0] - 0.5
    end = rows(reference)[-1]
    assert end["event"] == "end"
    assert end["outcome"] == "finished"


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_give_the_same_curve(ranks: int, recipe: Path, reference: Path) -> None:
    run(recipe, "--nproc", str(ranks))
    folder = recipe.parent / "runs" / "tiny"
    assert_same_curve(curve(folder), curve(reference), rtol=1e-5)
    counted = [row["comm_bytes"]["replicas"] for row in rows(folder) if "event" not in row]
    parameters, units, alignment = json.loads((folder / "run.json").read_text())["parameters"], 4, 32
    assert all(ops.keys() == {"all_to_all", "all_gather"} for ops in counted)
    for size in (size for ops in counted for size in ops.values()):
        assert 4 * parameters <= size <= 4 * (parameters + units * alignment * ranks)


def test_other_number_of_ranks_goes_on(recipe: Path, reference: Path) -> None:
    stopped = interrupt(recipe, "--nproc", "4")
    assert stopped.returncode == 75, stopped.stderr
    assert "resumes" in stopped.stderr
    folder = recipe.parent / "runs" / "tiny"
    before = len(curve(folder))
    assert 0 < before < len(curve(reference))
    run(recipe, "--nproc", "2")
    assert_same_curve(curve(folder), curve(reference), rtol=1e-5)


def interrupt(recipe: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start a run, and send it SIGTERM once it has logged a few steps."""
    process = subprocess.Popen(
        command(recipe, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    metrics = recipe.parent / "runs" / "tiny" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_terminal_is_closed_saves_first(ranks: int, recipe: Path) -> None:
    """With nohup, which ignores the signal, it goes on."""
    folder = recipe.parent / "runs" / "tiny"
    for ignored in (True, False):
        ours, terminal = os.openpty()
        process = subprocess.Popen(
            [*(["nohup"] if ignored else []), *command(recipe, "--nproc", str(ranks), "train.steps=100000")],
            stdin=terminal, stdout=terminal, stderr=terminal, text=True, env=environment(), start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0), cwd=recipe.parent,
        )  # fmt: skip
        os.close(terminal)
        logged = last_step(folder)
        wait_for(lambda logged=logged: last_step(folder) > logged + 2, process)
        os.close(ours)
        if ignored:
            after = last_step(folder)
            wait_for(lambda after=after: last_step(folder) > after + 10, process)
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 75
        assert rows(folder)[-1]["outcome"] == "stopped"


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def kill_until_done(recipe: Path, kills: int, steps: int, *arguments: str) -> None:
    """Run the same command several times, and kill it or one of its ranks at a random moment each time; then let it
    finish."""
    chance, folder = random.Random(1), recipe.parent / "runs" / "tiny"
    for _ in range(kills):
        # One kill in five comes during the start, the others some steps later; together they do not reach the last
        # step.
        begun, further = last_step(folder), chance.uniform(-0.4, 1.6) * steps / kills
        process = subprocess.Popen(
            command(recipe, *arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment()
        )
        if further < 0:
            time.sleep(chance.uniform(0.0, 2.0))
        else:
            wait_for(lambda goal=begun + further: last_step(folder) >= goal, process)
            time.sleep(chance.uniform(0.0, 0.05))
        assert process.poll() is None, process.communicate()
        chance.choice([psutil.Process(process.pid), *psutil.Process(process.pid).children()]).kill()
        process.communicate()
        assert process.returncode in (-signal.SIGKILL, 1)
    run(recipe, *arguments)


def check_kills(recipe: Path, corpus: Path, kills: int, steps: int, *arguments: str) -> None:
    arguments = (f"train.steps={steps}", "checkpoint.every=20", "train.eval_every=50", *arguments)
    calm = recipe.with_name("calm.yaml")
    calm.write_text(RECIPE.format(name="calm", data=corpus, runs=recipe.parent / "runs"))
    run(calm, *arguments)
    kill_until_done(recipe, kills, steps, *arguments)
    folder = recipe.parent / "runs"
    assert curve(folder / "tiny") == curve(folder / "calm")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_ctrl_c_ends_a_run_at_once(ranks: int, recipe: Path) -> None:
    """The signals come during a step that takes much longer than the test waits."""
    sizes = ("train.global_batch=100000", "train.eval_every=0", "train.timeout=600")
    process = subprocess.Popen(
        command(recipe, "--nproc", str(ranks), *sizes), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(),
    )  # fmt: skip
    metrics = recipe.parent / "runs" / "tiny" / "metrics.jsonl"
    wait_for(metrics.exists, process)
    time.sleep(1)
    children = psutil.Process(process.pid).children(recursive=True)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "llmtrain: interrupted\n")
    assert not [child for child in children if child.is_running()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_once_a_run_has_saved_changes_nothing(ranks: int, recipe: Path) -> None:
    process = subprocess.Popen(
        command(recipe, "--nproc", str(ranks), "train.steps=100000"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, env=environment(),
    )  # fmt: skip
    wait_for(lambda: last_step(recipe.parent / "runs" / "tiny") >= 3, process)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    said = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, more = process.communicate(timeout=30)
    assert (process.returncode, more) == (75, "")
    assert re.fullmatch(r"llmtrain: stopped after step \d+ and saved; .*\n", said)


def catches(process: subprocess.Popen[str], number: int) -> bool:
    """Return whether a process handles a signal."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def imports_torch(process: subprocess.Popen[str]) -> bool:
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


def listens(process: subprocess.Popen[str]) -> bool:
    """Return whether a process has begun to launch ranks."""
    return any(each.status == psutil.CONN_LISTEN for each in psutil.Process(process.pid).net_connections())


TOLD = "told to stop before anything was done; the same command starts again"


@pytest.mark.parametrize(
    ("number", "code", "sentence"),
    [
        (signal.SIGINT, 130, "interrupted"),
        *((one, 75, TOLD) for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)),
    ],
)
@pytest.mark.parametrize(
    ("ranks", "when"),
    [
        (1, lambda process: catches(process, signal.SIGUSR1)),
        (1, imports_torch),
        (2, imports_torch),
        (2, listens),
    ],
    ids=["parses", "imports", "imports for ranks", "launches"],
)
def test_a_signal_before_there_are_ranks_ends_the_run(
    ranks: int, when: Callable[[subprocess.Popen[str]], bool], number: int, code: int, sentence: str, recipe: Path
) -> None:
    """The signal comes at any time between reading the command line and starting the ranks."""
    process = subprocess.Popen(
        command(recipe, "--nproc", str(ranks), "train.steps=100000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment(),
    )  # fmt: skip
    wait_for(lambda: when(process), process)
    assert not psutil.Process(process.pid).children()
    process.send_signal(number)
    assert process.communicate(timeout=60) == ("", f"llmtrain: {sentence}\n")
    assert process.returncode == code


DEAF = """
import os, signal, time
if os.environ.get("RANK") == "0":
    signal.signal(signal.SIGTERM, lambda *signal: None)
    open(os.environ["DEAF"], "w").close()
    while True:
        time.sleep(1)
"""


def test_a_rank_that_waits_for_one_that_was_told_to_stop_ends_too(recipe: Path, tmp_path: Path) -> None:
    """One rank handles the signal, as a run does from its first step on, and waits for the other rank, which dies of
    it."""
    (tmp_path / "sitecustomize.py").write_text(DEAF)
    deaf = tmp_path / "deaf"
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command(recipe, "--nproc", "2"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**environment(), "PYTHONPATH": paths, "DEAF": str(deaf)},
    )  # fmt: skip
    wait_for(deaf.exists, process)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("", f"llmtrain: {TOLD}\n")
    assert process.returncode == 75
    assert time.monotonic() - begin < 15


def test_kill_9_leaves_the_curve_bit_exact(recipe: Path, corpus: Path) -> None:
    check_kills(recipe, corpus, 4, 400)


def test_a_rank_lost_in_a_gather_ends_the_run(recipe: Path) -> None:
    """The other ranks wait in a gather for a suspended rank, and its death breaks the gather."""
    arguments = ("--nproc", "4", "zero.stage=3", "train.steps=100000", "train.eval_every=0", "checkpoint.every=0")
    process = subprocess.Popen(
        command(recipe, *arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment()
    )
    folder = recipe.parent / "runs" / "tiny"
    wait_for(lambda: last_step(folder) >= 3, process)
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 4
    ranks[2].suspend()
    time.sleep(1.0)
    stands = last_step(folder)
    time.sleep(1.0)
    assert last_step(folder) == stands
    ranks[2].kill()
    _, errors = process.communicate(timeout=LOST_RANK_SECONDS)
    assert process.returncode == 1
    (sentence,) = [line for line in errors.splitlines() if line.startswith("llmtrain:")]
    assert re.fullmatch(
        rf"llmtrain: rank 2 was killed by SIGKILL on {re.escape(socket.gethostname())} after step \d+, in .+, so the "
        "run stopped; there is no checkpoint yet, so the same command starts again",
        sentence,
    )
    assert "Traceback" not in errors
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", ["1", "2", "4"])
def test_kill_9_at_twenty_moments(ranks: str, recipe: Path, corpus: Path) -> None:
    check_kills(recipe, corpus, 20, 2000, "--nproc", ranks)
