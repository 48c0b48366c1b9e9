"""Messages between stages over MPI have the same content as torch's."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest

from tests.ranks.forks import environment
from tests.ranks.harness import Case, Trainer, worst_difference
from tests.ranks.test_grid import SCHEDULES, grid
from tests.ranks.test_parity import settled

MPI = "pipeline.transport=mpi"
FEW = [
    grid(1, 4, 1, MPI, schedule="message-driven"),
    grid(2, 2, 1, MPI, schedule="zero-bubble-v", sequence=True, family="gpt2"),
]
EVERY = [
    *(grid(1, 4, 1, MPI, schedule=schedule) for schedule in SCHEDULES),
    *(grid(1, 2, 2, MPI, "zero.stage=3", schedule=schedule, family="neox") for schedule in SCHEDULES),
]


@pytest.mark.skipif(which("mpirun") is None or find_spec("mpi4py") is None, reason="needs mpirun and mpi4py")
@pytest.mark.parametrize("cases", [FEW, pytest.param(EVERY, marks=pytest.mark.soak)], ids=["few", "every"])
@pytest.mark.timeout(900)
def test_messages_over_mpi(cases: list[Case], trainer: Trainer) -> None:
    """One test runs all cases, because starting ranks takes most of the time."""
    job = {"cases": [case.job(trainer.recipe) for case in cases]}
    ranks = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "4", sys.executable]
    started = subprocess.run(
        [*ranks, str(Path(__file__).with_name("mpi_rank.py")), json.dumps(job)],
        capture_output=True, text=True, timeout=880, check=False, env=environment(),
    )  # fmt: skip
    assert started.returncode == 0, started.stderr[-3000:]
    for case in cases:
        over_torch = replace(case, keys=tuple(key for key in case.keys if key != MPI))
        trainer.train([over_torch])
        ours, theirs = trainer.result(case), trainer.result(over_torch)
        assert worst_difference(ours.curve, theirs.curve)[0] < 1e-6
        assert worst_difference(settled(ours), settled(theirs))[0] < 1e-6
