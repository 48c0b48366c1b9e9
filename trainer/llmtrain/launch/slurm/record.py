"""The record of a run's jobs: `RUN_DIR/slurm/` has their script, recipes and logs, a list of their numbers, and the
digests of the recipe's files at submission."""

import re
from collections.abc import Iterable
from pathlib import Path

import xxhash
from llmtrain_data.untrusted import UnreadableError, read_bytes, read_text

_SOURCES = "sources"
# A job's number, or that of an array's task.
_NUMBER = re.compile(r"[0-9]{1,20}(_[0-9]{1,20})?")
# The most bytes to read from a list of jobs or files. Recipes and cluster descriptions are smaller.
_LARGEST = 2**20
# The most files to check, as the list may be untrusted.
_MOST_SOURCES = 100


def slurm_folder(run_dir: Path) -> Path:
    """Return the folder of the run's script, logs and list of jobs."""
    return run_dir / "slurm"


def record_job(run_dir: Path, number: str) -> None:
    """Add a job to the run's list. number: `12`, or `12_3` for one of an array."""
    with (slurm_folder(run_dir) / "jobs").open("a", encoding="utf-8") as file:
        file.write(f"{number}\n")


def record_sources(run_dir: Path, files: Iterable[Path]) -> None:
    """Record the digests of the submitted recipe's files."""
    lines = [f"{_digest(file.absolute())}  {file.absolute()}\n" for file in files]
    (slurm_folder(run_dir) / _SOURCES).write_text("".join(lines), encoding="utf-8")


def changed_sources(run_dir: Path) -> list[Path]:
    """Return those of the submitted recipe's files that have changed since, or are gone."""
    try:
        lines = read_text(slurm_folder(run_dir) / _SOURCES, _LARGEST).splitlines()
    except UnreadableError:
        return []
    recorded = [line.partition("  ") for line in lines[:_MOST_SOURCES]]
    return [Path(file) for digest, _, file in recorded if file and _digest(Path(file)) != digest]


def _digest(file: Path) -> str:
    try:
        return str(xxhash.xxh3_64_hexdigest(read_bytes(file, _LARGEST)))
    except UnreadableError:
        return "unreadable"


def jobs_of(run_dir: Path) -> list[str]:
    """Return the numbers of the run's jobs, oldest first; none if it was not submitted."""
    try:
        words = read_bytes(slurm_folder(run_dir) / "jobs", _LARGEST).decode(errors="replace").split()
    except UnreadableError:
        return []
    return [word for word in words if _NUMBER.fullmatch(word)]


def log_of(run_dir: Path, number: str) -> Path:
    """Return the path of a job's log, which exists once the job has begun."""
    return slurm_folder(run_dir) / f"{number}.log"
