"""Slurm's commands: handing a job in, and asking what became of it."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.errors import BadInputError, RunFailedError

# States that a job ends in; in any other it may still run, or run again.
ENDED = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "PREEMPTED", "TIMEOUT"})
ENDED |= {"OUT_OF_MEMORY", "REVOKED"}
# Seconds after which a controller that does not answer is given up.
_PATIENCE = 20


@dataclass(frozen=True)
class QueuedJob:
    """A job as Slurm reports it. number: as shown, `12` or `12_3`. state: Slurm's word. detail: the nodes of a running
    job, why another one waits, how a finished one ended."""

    number: str
    state: str
    detail: str

    @property
    def active(self) -> bool:
        """Whether the job may still run, or run again."""
        return self.state not in ENDED


def submit(script: Path, after: Sequence[str] = ()) -> str:
    """Hand in a batch script and return the job's number. after: jobs that all have to have ended without success; when
    one succeeds, the job is dropped. Raises BadInputError where there is no Slurm, RunFailedError when it refuses."""
    command = ["sbatch", "--parsable"]
    if after:
        command += [f"--dependency=afternotok:{':'.join(after)}", "--kill-on-invalid-dep=yes"]
    try:
        done = subprocess.run([*command, str(script)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BadInputError(
            "there is no sbatch here; submit where Slurm is, or use --dry-run to see the script"
        ) from None
    if done.returncode:
        said = " ".join(done.stderr.split()).removeprefix("sbatch: error: ")
        raise RunFailedError(f"sbatch refused {script}: {said}")
    # A cluster's name may follow.
    return done.stdout.strip().partition(";")[0]


def jobs(numbers: Sequence[str]) -> dict[str, QueuedJob] | None:
    """Return those of the jobs that Slurm remembers, by number; None where it cannot be asked."""
    if not numbers:
        return {}
    # --states=all also lists jobs that ended a while ago; one that is not known fails the query for a single job.
    listed = _ask("squeue", "--noheader", "--states=all", f"--jobs={','.join(numbers)}", "--array", "--format=%i|%T|%R")
    if listed is None:
        return None
    found = _parse(listed)
    if left := [number for number in numbers if number not in found]:
        form = ("--noheader", "--allocations", "--parsable2", "--format=JobID,State,ExitCode")
        found |= _parse(_ask("sacct", *form, f"--jobs={','.join(left)}") or "")
    return found


def still_active(number: str) -> bool | None:
    """Whether a job may still run, or run again; None where Slurm cannot be asked."""
    found = jobs([number])
    return None if found is None else any(job.active for job in found.values())


def _ask(*command: str) -> str | None:
    """Return what a command prints: nothing where it knows none of the jobs, None where there is no Slurm to ask."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return done.stdout
    return "" if "Invalid job id" in done.stderr else None


def _parse(listed: str) -> dict[str, QueuedJob]:
    rows = [line.split("|", 2) for line in listed.splitlines() if line.count("|") >= 2]
    # sacct adds who cancelled a job.
    return {row[0]: QueuedJob(row[0], row[1].split()[0], row[2].strip("()")) for row in rows if row[1]}
