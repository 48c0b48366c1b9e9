"""Which jobs trained in a run's folder: `RUN_DIR/slurm/` has their script, their logs and a list of their numbers."""

import re
from pathlib import Path

from llmtrain_data.untrusted import UnreadableError, read_bytes

# A job, or one of an array.
_NUMBER = re.compile(r"[0-9]{1,20}(_[0-9]{1,20})?")
_LARGEST = 2**20


def slurm_folder(run_dir: Path) -> Path:
    """Return the folder of the run's script, logs and list of jobs."""
    return run_dir / "slurm"


def note_job(run_dir: Path, number: str) -> None:
    """Add a job to the run's list. number: `12`, or `12_3` for one of an array."""
    with (slurm_folder(run_dir) / "jobs").open("a", encoding="utf-8") as file:
        file.write(f"{number}\n")


def jobs_of(run_dir: Path) -> list[str]:
    """Return the numbers of the run's jobs, oldest first; none where it was not submitted."""
    try:
        words = read_bytes(slurm_folder(run_dir) / "jobs", _LARGEST).decode(errors="replace").split()
    except UnreadableError:
        return []
    return [word for word in words if _NUMBER.fullmatch(word)]


def log_of(run_dir: Path, number: str) -> Path:
    """Return the log of one of the run's jobs, which is there once the job has begun."""
    return slurm_folder(run_dir) / f"{number}.log"
