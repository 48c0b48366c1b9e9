"""Ranks as srun starts them, with a fault in one of them: the others stop in time, and one sentence gives the
reason."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from tests.tiny import rows, write_corpus
from tools.ports import free_ports

RECIPE = """
name: tiny
model: {{family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2, vocab: 61}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: 12, global_batch: 8, microbatch: 2, eval_every: 0, compare_every: 2, timeout: {timeout}}}
optimizer: {{lr: 1.0e-2, warmup: 5}}
checkpoint: {{every: 4}}
logging: {{every: 1, dir: {folder}/runs}}
"""
TIMEOUT = 8
SOAK = pytest.mark.soak
# Further seconds that a busy machine may take until a process has ended.
MARGIN = 4
HOST = re.escape(socket.gethostname())


@dataclass(frozen=True)
class Ended:
    """How ranks ended. seconds: since the fault."""

    codes: list[int]
    seconds: float
    output: list[str]
    folder: Path

    @property
    def sentences(self) -> list[str]:
        """The output of all ranks together."""
        return [line for text in self.output for line in text.splitlines() if line.startswith("llmtrain:")]


class Patient:
    """A worker whose ranks suffer faults."""

    def __init__(self, folder: Path) -> None:
        write_corpus(folder / "set", 300, 61)
        self._folder, self._count = folder, 0
        (folder / "tiny.yaml").write_text(RECIPE.format(folder=folder, timeout=TIMEOUT))
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LLMTRAIN_")}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("faulty.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**environment, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def harmed(self, world: int, fault: str, rank: int, *overrides: str, step: int = 5) -> Ended:
        """Train the tiny recipe, and cause a fault in a rank before it computes the step after `step`."""
        self._count += 1
        name = f"run-{self._count}"
        place = self._folder / name
        place.mkdir()
        arguments = ["run", str(self._folder / "tiny.yaml"), f"name={name}", *overrides]
        (port,) = free_ports(1)
        job = {"folder": str(place), "world": world, "port": port, "fault": fault, "rank": rank, "step": step}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({**job, "arguments": arguments}), file=self.process.stdin, flush=True)
        codes, seconds = json.loads(self.process.stdout.readline())
        output = [(place / f"rank-{number}.log").read_text() for number in range(world)]
        return Ended(codes, seconds, output, self._folder / "runs" / name)


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    patient = Patient(tmp_path_factory.mktemp("faults"))
    yield patient
    patient.process.communicate()


@pytest.mark.parametrize(
    ("world", "fault", "rank", "overrides", "said"),
    [
        (4, "flip weight", 2, (), "rank 2 on {host} holds other weights than ranks 0, 1, 3, found after step 6"),
        pytest.param(4, "flip m", 0, ("zero.stage=2",), None, marks=SOAK),
        pytest.param(
            3,
            "flip m",
            0,
            # In fp32 the masters are the weights, which the next step changes.
            ("train.global_batch=12", "precision.compute=bf16"),
            "rank 0 on {host} holds other optimizer states than ranks 1, 2",
            marks=SOAK,
        ),
        pytest.param(
            2, "flip weight", 1, (), "rank 0 on {host} and rank 1 on {host} hold different weights", marks=SOAK
        ),
        (2, "flip shared", 1, ("parallel.tensor=2",), "hold different weights that tensor-parallel ranks share"),
    ],
)
def test_a_flipped_bit(
    world: int, fault: str, rank: int, overrides: tuple[str, ...], said: str | None, patient: Patient
) -> None:
    ended = patient.harmed(world, fault, rank, *overrides)
    if said is None:
        # A state without a second copy cannot be compared.
        assert ended.codes == [0] * world, ended.output
        return
    assert ended.codes == [1] * world, ended.output
    (sentence,) = ended.sentences
    assert said.format(host=socket.gethostname()) in sentence
    assert "all were equal after step 4" in sentence
    assert sentence.endswith("; the same command resumes from the newest checkpoint, if there is one")
    assert [path.name for path in (ended.folder / "checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.parametrize(
    "overrides",
    [
        ("zero.stage=1", "precision.compute=bf16"),
        pytest.param(("zero.stage=3",), marks=SOAK),
        pytest.param(("parallel.tensor=2", "parallel.sequence=true"), marks=SOAK),
        ("parallel.tensor=2", "parallel.pipeline=2", "model.tie_embeddings=true"),
        ("parallel.pipeline=2", "pipeline.schedule=message-driven", "zero.stage=1", "model.tie_embeddings=true"),
        pytest.param(("zero.preset=zero++", "zero.secondary=2"), marks=SOAK),
    ],
    ids=" ".join,
)
def test_what_is_alike_is_found_alike(overrides: tuple[str, ...], patient: Patient) -> None:
    ended = patient.harmed(4, "none", -1, "train.compare_every=1", "train.steps=6", *overrides)
    assert ended.codes == [0] * 4, ended.output


@pytest.mark.parametrize(
    ("fault", "rank", "overrides", "said"),
    [
        ("hang", 1, (), r"the others wait for rank 1 on {host}, which stopped after step 5, in computing"),
        pytest.param(
            "hang",
            0,
            ("zero.stage=3",),
            r"the others wait for rank 0 on {host}, which stopped after step 5, in",
            marks=SOAK,
        ),
        pytest.param(
            "hang",
            1,
            ("parallel.pipeline=2",),
            r"the others wait for rank 1 on {host}, which stopped after step 5",
            marks=SOAK,
        ),
        ("lost disk", 1, (), r"wait for rank 1 on {host}, which stopped after step \d+, in writing its part of a"),
        pytest.param(
            "stop",
            1,
            ("zero.stage=3",),
            r"rank 1 on {host} has not answered for .* s, last seen after step \d",
            marks=SOAK,
        ),
        ("stop", 0, (), r"rank 0 on {host}.* has not answered .*last seen after step \d"),
        pytest.param(
            "kill",
            1,
            ("parallel.tensor=2",),
            r"rank 1 on {host} has not answered for .* s, last seen after step \d",
            marks=SOAK,
        ),
        ("kill", 1, ("parallel.pipeline=2",), r"rank 1 on {host} has not answered for .* s, last seen after step \d"),
        ("kill", 0, (), r"rank 0 on {host}.* has not answered .*last seen after step \d"),
    ],
)
def test_a_rank_that_hangs_or_dies(
    fault: str, rank: int, overrides: tuple[str, ...], said: str, patient: Patient
) -> None:
    ended = patient.harmed(2, fault, rank, *overrides)
    assert ended.codes[1 - rank] == 1, ended.output
    assert ended.codes[rank] in (1, -9)
    (sentence,) = ended.sentences
    assert re.search(said.format(host=HOST), sentence), sentence
    assert ended.seconds < TIMEOUT + MARGIN
    assert not any("Traceback" in text for text in ended.output)


def test_a_disk_that_is_lost_to_the_only_rank(patient: Patient) -> None:
    ended = patient.harmed(1, "lost disk", 0)
    assert ended.codes == [1]
    (sentence,) = ended.sentences
    assert re.search(
        r"nothing has moved for .* s in writing its part of a checkpoint, after step \d+; where that may take as long, "
        r"raise train\.timeout",
        sentence,
    )
    end = rows(ended.folder)[-1]
    assert (end["event"], end["outcome"]) == ("end", "failed")
    assert end["reason"] in sentence
    # The next save, some steps later, waits for the one that hangs.
    assert ended.seconds < TIMEOUT + MARGIN


def test_a_crash_is_shown_once(patient: Patient) -> None:
    ended = patient.harmed(2, "crash", 1)
    assert ended.codes == [1, 1]
    assert ended.sentences == []
    assert ["Traceback" in text for text in ended.output] == [False, True]
    assert "some bug" in ended.output[1]
    assert ended.seconds < TIMEOUT + MARGIN


def test_a_straggler_is_named(patient: Patient) -> None:
    ended = patient.harmed(4, "slow", 2, step=3)
    assert ended.codes == [0] * 4, ended.output
    warnings = [line for line in ended.output[0].splitlines() if "warning: rank" in line]
    # Other processes on this machine may slow another rank for a step, which is then named first.
    named = rf"warning: rank 2 on {HOST} computes [\d.]+ times as long as ranks with the same work"
    assert any(re.fullmatch(named, warning) for warning in warnings), warnings
    logged = rows(ended.folder)
    samples = [row["rank_compute_s"] for row in logged if "event" not in row and row["step"] > 4]
    told = [sample for sample in samples if sample["rank"] == 2]
    assert len(told) > len(samples) // 2
    assert all(sample["slowest"] > 0.15 for sample in told)
    assert median(sample["slowest"] / sample["median"] for sample in told) > 1.5
