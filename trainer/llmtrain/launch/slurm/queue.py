"""Slurm's commands: submit a job, and query its state."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.errors import BadInputError, RunFailedError

# Final states of a job; in any other state it may still run, or run again.
ENDED = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "PREEMPTED", "TIMEOUT"})
ENDED |= {"OUT_OF_MEMORY", "REVOKED"}
# Seconds to wait for an answer from Slurm's controller.
_TIMEOUT = 20


@dataclass(frozen=True)
class QueuedJob:
    """A job as Slurm reports it. number: `12`, or `12_3` in an array. state: Slurm's name for it. detail: nodes of a
    running job, why a pending one waits, how a finished one ended."""

    number: str
    state: str
    detail: str

    @property
    def active(self) -> bool:
        """Return whether the job may still run, or run again."""
        return self.state not in ENDED


def submit(script: Path, after: Sequence[str] = ()) -> str:
    """Submit a batch script and return the job's number. after: jobs that must all fail first; if one succeeds, Slurm
    drops this job. Raises BadInputError if there is no Slurm, RunFailedError if it refuses."""
    command = ["sbatch", "--parsable"]
    if after:
        command += [f"--dependency=afternotok:{':'.join(after)}", "--kill-on-invalid-dep=yes"]
    try:
        done = subprocess.run(
            [*command, str(script)], capture_output=True, text=True, check=False, env=_without_job(os.environ)
        )
    except FileNotFoundError:
        raise BadInputError(
            "there is no sbatch here; submit where Slurm is, or use --dry-run to see the script"
        ) from None
    if done.returncode:
        said = " ".join(done.stderr.split()).removeprefix("sbatch: error: ")
        raise RunFailedError(f"sbatch refused {script}: {said}")
    # sbatch may append `;` and the cluster's name.
    return done.stdout.strip().partition(";")[0]


def _without_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what Slurm has set for the job that it is part of, if any, which a new job would
    take for its own, such as SLURM_CPUS_PER_TASK."""
    if "SLURM_JOB_ID" not in environment:
        return dict(environment)
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {name: value for name, value in environment.items() if not name.startswith("SLURM_") or name in kept}


def jobs(numbers: Sequence[str]) -> dict[str, QueuedJob] | None:
    """Return the jobs that Slurm remembers, by number; None if Slurm does not answer."""
    if not numbers:
        return {}
    # --states=all also lists jobs that have ended. A query for a single unknown job fails.
    listed = _ask("squeue", "--noheader", "--states=all", f"--jobs={','.join(numbers)}", "--array", "--format=%i|%T|%R")
    if listed is None:
        return None
    found = _parse(listed)
    if missing := [number for number in numbers if number not in found]:
        form = ("--noheader", "--allocations", "--parsable2", "--format=JobID,State,ExitCode")
        found |= _parse(_ask("sacct", *form, f"--jobs={','.join(missing)}") or "")
    return found


def job_states(number: str) -> set[str] | None:
    """Return Slurm's states of a job, several for an array, none for one that Slurm has forgotten; None if Slurm does
    not answer."""
    found = jobs([number])
    return None if found is None else {job.state for job in found.values()}


def still_active(number: str) -> bool | None:
    """Return whether a job may still run, or run again; None if Slurm does not answer."""
    states = job_states(number)
    return None if states is None else not states <= ENDED


def _ask(*command: str) -> str | None:
    """Return a command's output: empty if it knows none of the jobs, None if Slurm does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return done.stdout
    return "" if "Invalid job id" in done.stderr else None


def _parse(listed: str) -> dict[str, QueuedJob]:
    rows = [line.split("|", 2) for line in listed.splitlines() if line.count("|") >= 2]
    # After CANCELLED, sacct adds the user who cancelled the job.
    return {row[0]: QueuedJob(row[0], row[1].split()[0], row[2].strip("()")) for row in rows if row[1]}
