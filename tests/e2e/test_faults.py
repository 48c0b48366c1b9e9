"""Random faults, one after another in one run: each ends in one clear sentence in time, and the same command resumes
and ends with the weights of an undisturbed run."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from _pytest.mark import ParameterSet

from tests.tiny import last_step, small_disk, write_corpus

RECIPE = """
name: {name}
model: {{family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: {steps}, global_batch: 8, microbatch: 1, eval_every: 50, timeout: {timeout}, compare_every: 20}}
optimizer: {{lr: 1.0e-2, warmup: 5}}
checkpoint: {{every: 10}}
logging: {{every: 1, dir: {runs}}}
"""
# Seconds within which a lost or hung rank ends the run, from the recipe.
TIMEOUT = 12
# Further seconds until all processes have ended: torch's agent, and a busy machine.
MARGIN = 8
# Steps, divided by the number of ranks, that keep a run going until a second start of it has reached the lock.
LONG = 2000
ROOM = 16 * 2**20
AGAIN = r"(the same command resumes from step \d+|there is no checkpoint yet, so the same command starts again)$"
SAID = {
    "kill": r"rank \d was killed by SIGKILL on .* after step \d+, in .*, so the run stopped; " + AGAIN,
    "stop": r"rank \d on .* has not answered for .* after step \d+, in .*, so the run stopped; " + AGAIN,
}
IN_FILES = ("offload.paths=[.]", "offload.bucket=1024")
ON_HOST = ("offload.optimizer=host", "offload.bucket=1024", "offload.spare=1")
PART_AHEAD = ("offload.share=0.3", "offload.spare=1")
OFFLOADED = {
    "two-nvme": ("2", "zero.stage=2", "offload.optimizer=nvme", *IN_FILES),
    "two-all-nvme": ("2", "offload.optimizer=nvme", "offload.parameters=nvme", *IN_FILES),
    "two-nvme-ahead": (
        "2",
        "zero.stage=3",
        "offload.optimizer=nvme",
        "offload.share=0.3",
        "offload.spare=1",
        *IN_FILES,
    ),
    "two-host": ("2", "zero.stage=1", *ON_HOST),
    "two-host-device": ("2", "zero.stage=3", "offload.step=device", "offload.share=0.3", *ON_HOST),
    "two-activations": ("2", "activation_checkpointing=full", "offload.activations=nvme", IN_FILES[0]),
    "four-grid-nvme": (
        "4",
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "pipeline.schedule=zero-bubble",
        "offload.optimizer=nvme",
        *IN_FILES,
    ),
}
LAYOUTS = {
    "one": ("1",),
    "two": ("2",),
    "two-zero3": ("2", "zero.stage=3"),
    "two-tensor": ("2", "parallel.tensor=2", "parallel.sequence=true"),
    "four": ("4",),
    "four-zero3": ("4", "zero.stage=3", "checkpoint.async=false"),
    "four-grid": ("4", "parallel.tensor=2", "parallel.pipeline=2"),
    "four-stages": ("4", "parallel.pipeline=2", "zero.stage=1", "pipeline.schedule=zero-bubble"),
    **OFFLOADED,
}
OF_ONE = ("launcher", "full disk", "truncate", "flip", "two jobs")
OF_MORE = ("kill", "stop", *OF_ONE)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_corpus(folder / "set", 200)
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system that a test can fill."""
    with small_disk(tmp_path / "runs", str(ROOM)) as folder:
        yield folder


@dataclass
class Series:
    """A run that suffers faults. arguments: after the recipe's path."""

    recipe: Path
    folder: Path
    arguments: tuple[str, ...]
    chance: random.Random

    def start(self) -> subprocess.Popen[str]:
        """Start or resume the run."""
        command = [sys.executable, "-m", "llmtrain", "run", str(self.recipe), "--nproc", *self.arguments]
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def finish(self) -> None:
        """Resume the run up to the last step."""
        process = self.start()
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors

    @property
    def last_step(self) -> int:
        """Return the last step in the metrics so far."""
        return last_step(self.folder)

    def suffer(self, fault: str, further: int) -> bool:
        """Start the run, cause the fault some steps later, and check that the run ends as it should. Return whether a
        checkpoint was damaged."""
        goal, process = self.last_step + further, self.start()
        while self.last_step < goal:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        ranks = psutil.Process(process.pid).children()
        if fault == "two jobs":
            self._refuse_another()
        time.sleep(self.chance.uniform(0, 0.1))
        struck = time.monotonic()
        self._strike(fault, process, ranks)
        _, errors = process.communicate(timeout=120)
        took = time.monotonic() - struck
        psutil.wait_procs(ranks, timeout=5)
        assert took < TIMEOUT + MARGIN, (fault, took)
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks), fault
        said = [line for line in errors.splitlines() if line.startswith("llmtrain:")]
        assert "Traceback" not in errors, errors
        if fault in SAID:
            assert process.returncode == 1, (fault, errors)
            assert len(said) == 1, said
            assert re.search(SAID[fault], said[0]), said
        else:
            assert (process.returncode, said) == (-signal.SIGKILL, [])
        (self.folder.parent / "ballast").unlink(missing_ok=True)
        return fault in ("truncate", "flip") and self._damage(fault)

    def _refuse_another(self) -> None:
        """Start the same run a second time, which must not disturb the first."""
        other = self.start()
        _, errors = other.communicate(timeout=120)
        (said,) = [line for line in errors.splitlines() if line.startswith("llmtrain:")]
        assert other.returncode in (1, 2), errors
        assert "is being trained in by" in said

    def _strike(self, fault: str, process: subprocess.Popen[str], ranks: list[psutil.Process]) -> None:
        if fault == "kill":
            self.chance.choice(ranks).kill()
        elif fault == "stop":
            self.chance.choice(ranks).suspend()
        elif fault == "full disk":
            fill(self.folder.parent / "ballast")
            time.sleep(0.2)
            process.kill()
        else:
            process.kill()

    def _damage(self, fault: str) -> bool:
        """Damage a file of the newest checkpoint, if it is not the only one; return whether."""
        found = sorted(path for path in (self.folder / "checkpoints").glob("step-*") if not path.suffix)
        if len(found) < 2:
            return False
        path = self.chance.choice(sorted(found[-1].iterdir()))
        content = bytearray(path.read_bytes())
        place = self.chance.randrange(len(content))
        if fault == "truncate":
            del content[place:]
        else:
            content[place] ^= 1 << self.chance.randrange(8)
        path.write_bytes(bytes(content))
        return True


def fill(path: Path) -> None:
    """Fill the file system to the last byte."""
    with path.open("wb", buffering=0) as file:
        for size in (2**16, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def outcome(folder: Path) -> tuple[dict[tuple[str, int], float], dict[str, bytes]]:
    """Return every logged loss, and the files of the last checkpoint."""
    curve: dict[tuple[str, int], float] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        key = (row.get("event", "step"), row["step"])
        if key[0] != "end":
            assert key not in curve
            curve[key] = row["loss"]
    newest = max((folder / "checkpoints").iterdir())
    return curve, {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


def suffer_all(layout: str, faults: list[str], corpus: Path, disk: Path, seed: int) -> int:
    """Cause faults at random moments of a run, let it finish, and compare it with an undisturbed run. Return the number
    of checkpoints that were damaged."""
    chance = random.Random(seed)
    steps = 30 * len(faults) + 30 + faults.count("two jobs") * LONG // int(LAYOUTS[layout][0])
    recipes = {}
    for name in ("calm", "harmed"):
        recipes[name] = disk.parent / f"{name}.yaml"
        recipes[name].write_text(RECIPE.format(name=name, folder=corpus, runs=disk, steps=steps, timeout=TIMEOUT))
    Series(recipes["calm"], disk / "calm", LAYOUTS[layout], chance).finish()
    series, damaged = Series(recipes["harmed"], disk / "harmed", LAYOUTS[layout], chance), 0
    for number, fault in enumerate(faults):
        begun = time.monotonic()
        damaged += series.suffer(fault, chance.randint(1, 40))
        print(f"{layout} {number}: {fault}, at step {series.last_step}, {time.monotonic() - begun:.0f} s")
    series.finish()
    assert outcome(disk / "harmed") == outcome(disk / "calm")
    return damaged


def test_faults(corpus: Path, disk: Path) -> None:
    assert suffer_all("two-zero3", ["stop", "flip"], corpus, disk, seed=0) == 1


def kills() -> Iterator[ParameterSet]:
    """Yield layouts and numbers of kills."""
    for layout in OFFLOADED:
        if layout == "two-all-nvme":
            yield pytest.param(layout, 1)
        yield pytest.param(layout, 20, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])


@pytest.mark.parametrize(("layout", "count"), list(kills()))
def test_kills_with_states_elsewhere(layout: str, count: int, corpus: Path, disk: Path) -> None:
    """What a killed run left elsewhere is of no use to the next: it resumes from the checkpoint alone, and no file is
    left."""
    before = sorted(Path().iterdir())
    suffer_all(layout, ["kill"] * count, corpus, disk, seed=1)
    assert sorted(Path().iterdir()) == before


def test_a_run_outlives_a_full_disk(corpus: Path, disk: Path) -> None:
    """Rows of the time in which the disk is full are there at the end, and only its checkpoints are missing."""
    series = []
    for name in ("calm", "harmed"):
        recipe = disk.parent / f"{name}.yaml"
        recipe.write_text(RECIPE.format(name=name, folder=corpus, runs=disk, steps=400, timeout=TIMEOUT))
        series.append(Series(recipe, disk / name, ("1",), random.Random(0)))
    calm, harmed = series
    calm.finish()
    process = harmed.start()
    while harmed.last_step < 20:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    fill(disk / "ballast")
    time.sleep(0.5)
    reached = harmed.last_step
    (disk / "ballast").unlink()
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, last_words(errors)) == (0, [])
    assert reached < 400
    assert outcome(disk / "harmed") == outcome(disk / "calm")


def last_words(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("llmtrain:")]


def test_lost_ranks_are_started_again_and_then_left_out(corpus: Path, tmp_path: Path) -> None:
    """The same rank is lost twice before the first checkpoint, so the third attempt leaves it out. The user writes the
    next experiment's recipe meanwhile."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE.format(name="tiny", folder=corpus, runs=tmp_path, steps=60, timeout=TIMEOUT))
    series = Series(recipe, tmp_path / "tiny", ("2", "checkpoint.every=40", "train.max_restarts=2"), random.Random(0))
    process, lost = series.start(), set[int]()
    for _ in range(2):
        ranks: list[psutil.Process] = []
        while series.last_step < 3 or len(ranks) < 2:
            assert process.poll() is None, process.communicate()
            ranks = [rank for rank in psutil.Process(process.pid).children() if rank.pid not in lost]
            time.sleep(0.01)
        lost |= {rank.pid for rank in ranks}
        recipe.write_text("name: other")
        ranks[1].kill()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    first, second = last_words(errors)
    assert re.search(r"rank 1 was killed by SIGKILL .*; restart 1 of 2 from the start on 2 ranks", first)
    assert re.search(r"rank 1 was killed by SIGKILL .*; restart 2 of 2 from the start on 1 ranks", second)
    assert json.loads((tmp_path / "tiny" / "run.json").read_text())["world"] == 1


def test_ranks_that_are_started_again_resume_a_run_that_began_without_checkpoints(corpus: Path, tmp_path: Path) -> None:
    """`checkpoint.resume: never` keeps the run from others' checkpoints, and not from its own."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE.format(name="tiny", folder=corpus, runs=tmp_path, steps=60, timeout=TIMEOUT))
    keys = ("2", "checkpoint.every=5", "train.max_restarts=1", "checkpoint.resume=never")
    series = Series(recipe, tmp_path / "tiny", keys, random.Random(0))
    process = series.start()
    while not [*(tmp_path / "tiny/checkpoints").glob("step-*/manifest.json")]:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    psutil.Process(process.pid).children()[1].kill()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert re.search(r"restart 1 of 1 from step \d+ on 2 ranks", last_words(errors)[0])
    # The user's own second start does not.
    _, errors = series.start().communicate(timeout=100)
    assert "checkpoint.resume is never; give the run another name" in errors


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_faults(layout: str, part: int, corpus: Path, disk: Path) -> None:
    """Three faults in each layout, four times; the tests on a network add more."""
    seed = 4 * list(LAYOUTS).index(layout) + part
    kinds = OF_ONE if LAYOUTS[layout][0] == "1" else OF_MORE
    suffer_all(layout, random.Random(seed).choices(kinds, k=3), corpus, disk, seed)
