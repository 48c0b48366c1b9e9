"""Volumes that fail under a run: it ends in one sentence with exit code 1, the last checkpoint is good, and the same
command resumes and ends with the losses of an undisturbed run. Needs root."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import pytest

from tests.e2e.broken_volumes import mount_again, shut_down, thin_volume
from tests.tiny import Curve, curve, last_step, write_corpus
from tools.bench.volumes import volumes

RECIPE = """
name: tiny
model: {{preset: gpt2-1m, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16, split: [1, 0, 0]}}
train: {{steps: {steps}, global_batch: 4, microbatch: 1, eval_every: 0, compare_every: 0}}
optimizer: {{lr: 1.0e-3, warmup: 5}}
checkpoint: {{every: 10, keep: 3}}
offload: {{bucket: 16384}}
logging: {{every: 1}}
"""
MIB = 2**20
STEPS = 120
VOLUME = 64 * MIB
ZERO = ("zero.stage=2",)
GONE = r"which failed: Input/output error; the same command resumes from the newest checkpoint, if there is one$"
# The folder of the run fails first at whatever is written to it next.
UNWRITABLE = r"(cannot be written \(|was not saved: |which failed: )"

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_corpus(folder / "set", 200)
    return folder


@dataclass
class Run:
    """A run with states in files. recipe: its file. runs: its logging.dir. folders: offload.paths."""

    recipe: Path
    runs: Path
    folders: Sequence[Path]
    ranks: int = 1
    keys: tuple[str, ...] = ()

    def start(self, *more: str) -> subprocess.Popen[str]:
        states = [f"offload.paths=[{','.join(map(str, self.folders))}]", "offload.optimizer=nvme"]
        words = [*(states if self.folders else []), f"logging.dir={self.runs}", *self.keys, *more]
        return subprocess.Popen(
            [sys.executable, "-m", "llmtrain", "run", str(self.recipe), "--nproc", str(self.ranks), *words],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def reach(self, step: int, process: subprocess.Popen[str]) -> None:
        """Wait until the run has logged a step."""
        while last_step(self.runs / "tiny") < step:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)

    def finish(self, *more: str) -> Curve:
        """Run, or resume, to the end."""
        process = self.start(*more)
        _, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors
        return curve(self.runs / "tiny")

    def verify(self) -> None:
        """Check that there are checkpoints, and that all are good."""
        words = [sys.executable, "-m", "llmtrain", "ckpt", "verify", str(self.runs / "tiny")]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert [*(self.runs / "tiny/checkpoints").glob("step-*/manifest.json")]


def ends_in_one_sentence(process: subprocess.Popen[str], said: str) -> None:
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 1, errors
    assert "Traceback" not in errors, errors
    lines = [line for line in errors.splitlines() if line.startswith("llmtrain:")]
    assert len(lines) == 1, errors
    assert re.search(said, lines[0]), lines


def end_children() -> None:
    children = psutil.Process().children(recursive=True)
    for child in children:
        # It may have ended meanwhile.
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children)


@contextmanager
def mounted(folder: Path, *sizes: int) -> Iterator[list[Path]]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(volumes(sizes, str(folder)))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"file systems cannot be mounted here: {error}")
        # After a failed check, runs would keep the volumes busy.
        stack.callback(end_children)
        yield made


def written(recipe: Path, data: Path) -> Path:
    recipe.write_text(RECIPE.format(folder=data, steps=STEPS))
    return recipe


@pytest.fixture
def make(data: Path, tmp_path: Path) -> Callable[..., Run]:
    def made(*folders: Path, runs: Path = tmp_path / "runs", ranks: int = 1, keys: tuple[str, ...] = ()) -> Run:
        return Run(written(tmp_path / "tiny.yaml", data), runs, folders, ranks, (*ZERO, *keys))

    return made


@pytest.fixture(scope="module")
def undisturbed(data: Path) -> Callable[[int], Curve]:
    """Return the losses of a run of so many ranks whose states are beside the weights."""

    @cache
    def found(ranks: int) -> Curve:
        return Run(written(data / "tiny.yaml", data), data / f"of-{ranks}", (), ranks, ZERO).finish()

    return found


def test_a_volume_of_states_is_gone(make: Callable[..., Run], tmp_path: Path) -> None:
    with mounted(tmp_path, VOLUME) as (states,):
        run = make(states)
        process = run.start()
        run.reach(12, process)
        shut_down(states)
        ends_in_one_sentence(process, f"offload.paths has {states}, {GONE}")
    run.verify()


@pytest.mark.soak
@pytest.mark.parametrize("number", range(2))
def test_one_of_two_volumes_is_gone(
    number: int, make: Callable[..., Run], undisturbed: Callable[[int], Curve], tmp_path: Path
) -> None:
    """At a random step, of two ranks that save all the time; then the run resumes on the other volume alone."""
    chance = random.Random(number)
    keys = ("checkpoint.every=1", f"checkpoint.async={'true' if number % 2 else 'false'}")
    with mounted(tmp_path, VOLUME, VOLUME) as (first, second):
        run = make(first, second, ranks=2, keys=keys)
        process = run.start()
        run.reach(chance.randrange(5, 40), process)
        time.sleep(chance.uniform(0, 0.05))
        shut_down(second)
        ends_in_one_sentence(process, f"(offload.paths has {second}, {GONE}|was not saved: .*Input/output error)")
        run.verify()
        run.folders = [first]
        assert run.finish("checkpoint.every=100") == undisturbed(2)


@pytest.mark.soak
@pytest.mark.parametrize("asynchronous", ["true", "false"])
@pytest.mark.parametrize("beside", [False, True], ids=["states elsewhere", "states on it"])
def test_the_volume_of_the_checkpoints_is_gone(
    beside: bool, asynchronous: str, make: Callable[..., Run], undisturbed: Callable[[int], Curve], tmp_path: Path
) -> None:
    """While a checkpoint is written, as one is after every step. What was saved before has reached the device; not so
    the last rows of metrics.jsonl."""
    with mounted(tmp_path, 4 * VOLUME) as (volume,):
        keys = ("checkpoint.every=1", f"checkpoint.async={asynchronous}")
        run = make(volume if beside else tmp_path, runs=volume / "runs", keys=keys)
        process = run.start()
        run.reach(12, process)
        shut_down(volume)
        ends_in_one_sentence(process, UNWRITABLE)
        mount_again(volume)
        run.verify()
        found, expected = run.finish("checkpoint.every=100"), undisturbed(1)
        assert found.items() <= expected.items()
        assert ("step", STEPS) in found


@pytest.mark.soak
def test_a_volume_fills_in_a_resume(
    make: Callable[..., Run], undisturbed: Callable[[int], Curve], tmp_path: Path
) -> None:
    """It has less room than it says: writing the states that the checkpoint has fails."""
    run = make(tmp_path)
    process = run.start()
    run.reach(20, process)
    process.terminate()
    process.communicate(timeout=400)
    with thin_volume(VOLUME, 5 * MIB, str(tmp_path)) as states:
        run.folders = [states]
        ends_in_one_sentence(run.start(), rf"offload.paths has {states}, which failed: (Input/output|No space)")
    run.verify()
    run.folders = [tmp_path]
    assert run.finish() == undisturbed(1)


@pytest.mark.soak
def test_runs_share_a_volume_while_it_has_room(
    make: Callable[..., Run], undisturbed: Callable[[int], Curve], tmp_path: Path
) -> None:
    """States take 6.4 MiB: two runs fit, and a third one is refused until they have ended."""
    with mounted(tmp_path, 20 * MIB) as (states,):
        both = [make(states, runs=tmp_path / name) for name in ("first", "second")]
        processes = [run.start() for run in both]
        for run, process in zip(both, processes, strict=True):
            run.reach(5, process)
            process.send_signal(signal.SIGSTOP)
        third = make(states, runs=tmp_path / "third")
        refused = third.start()
        _, errors = refused.communicate(timeout=400)
        assert refused.returncode == 2, errors
        assert "are free, and the offload of 1 rank takes 6.38 MiB; " in errors
        for run, process in zip(both, processes, strict=True):
            process.send_signal(signal.SIGCONT)
            _, errors = process.communicate(timeout=400)
            assert process.returncode == 0, errors
            assert curve(run.runs / "tiny") == undisturbed(1)
        assert third.finish() == undisturbed(1)


@pytest.mark.soak
def test_a_volume_in_use_cannot_be_unmounted(
    make: Callable[..., Run], undisturbed: Callable[[int], Curve], tmp_path: Path
) -> None:
    """Detached by force, its files last as long as the run."""
    with mounted(tmp_path, VOLUME) as (states,):
        run = make(states)
        process = run.start()
        run.reach(5, process)
        unmounted = subprocess.run(["umount", states], capture_output=True, text=True, check=False)
        assert "target is busy" in unmounted.stderr
        process.communicate(timeout=400)
        assert process.returncode == 0
        assert curve(run.runs / "tiny") == undisturbed(1)
