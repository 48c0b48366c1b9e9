"""The progress of runs and the state of their jobs, from the runs' folders and from Slurm if there is one."""

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from llmtrain_data.untrusted import UnreadableError, reason, regular

from llmtrain.checkpoint.folder import step_folders, step_of
from llmtrain.errors import BadInputError
from llmtrain.launch.run_lock import holder_of
from llmtrain.launch.slurm import queue
from llmtrain.launch.slurm.queue import QueuedJob
from llmtrain.launch.slurm.record import changed_sources, jobs_of, log_of
from llmtrain.telemetry.metrics import Row, last_rows
from llmtrain.telemetry.run_file import checked_run_file
from llmtrain.yaml.near_folder import expect_run_folder, near_run

# Seconds between reads of a followed log, and between queries whether its job has ended.
_POLL, _QUERY = 0.5, 10.0
# Characters of a log in one read.
_CHUNK = 2**20
# A status names at most this many of the files that changed since submission.
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """One run. state: running, finished, failed, stopped (it was told to, or killed), or Slurm's state of its job.
    step: that of the newest row. loss: the last one logged. steps: number of steps of the whole run. seconds_left:
    until a running run ends. job: number of the active job, or the newest. detail: where it runs, why it waits, how it
    ended, which files are damaged or edited."""

    name: str
    folder: str
    state: str
    step: int | None
    steps: int | None
    loss: float | None
    seconds_left: float | None
    job: str | None
    detail: str


def statuses(paths: Sequence[Path]) -> list[RunStatus]:
    """Return the status of each run. paths: folders of runs, or folders that hold some. Raises BadInputError."""
    folders = [folder for path in paths for folder in _runs_in(path)]
    known = queue.jobs([number for folder in folders for number in jobs_of(folder)]) or {}
    return [_status(folder, known) for folder in folders]


def read_log(run: Path, number: str | None, follow: bool) -> Iterator[str]:
    """Yield the log of a run's job in chunks; with `follow`, until the job has ended.

    number: of the job, None for the newest that has begun. Raises BadInputError if there is no such log.
    """
    numbers = jobs_of(run)
    if not numbers:
        raise BadInputError(f"{run} was not submitted to Slurm; its output is where it was started")
    if number is None:
        number = next((each for each in reversed(numbers) if log_of(run, each).exists()), numbers[-1])
    if number not in numbers:
        raise BadInputError(f"--job is {number}, which is no job of {run}; expected one of {', '.join(numbers)}")
    if not log_of(run, number).exists() and not follow:
        job = (queue.jobs([number]) or {}).get(number)
        state = f"; Slurm says {job.state}, {job.detail}" if job else ""
        raise BadInputError(f"job {number} of {run} has written nothing{state}; add --follow to wait for it")
    yield from _chunks(log_of(run, number), number if follow else None)


def _chunks(path: Path, number: str | None) -> Iterator[str]:
    """Yield a file's text; with a job's number, also the text that is added until the job has ended."""
    position, asked, over = 0, time.monotonic(), number is None
    while True:
        if path.exists():
            with open(path, encoding="utf-8", errors="replace", opener=regular) as file:
                file.seek(position)
                while chunk := file.read(_CHUNK):
                    yield chunk
                position = file.tell()
        if over:
            return
        time.sleep(_POLL)
        if number is not None and time.monotonic() - asked > _QUERY:
            # The loop reads the job's last lines once more. Without an answer from Slurm, keep following.
            asked, over = time.monotonic(), queue.still_active(number) is False


def _runs_in(path: Path) -> list[Path]:
    expect_run_folder(path, "expected a run's, or one that holds runs (logging.dir)")
    found = [path] if _is_run(path) else sorted(child for child in path.iterdir() if child.is_dir() and _is_run(child))
    if not found:
        raise BadInputError(f"{path} is not the folder of a run and holds none; give a run's folder, or logging.dir")
    return found


def _is_run(path: Path) -> bool:
    return any(os.path.exists(path / name) for name in ("run.json", "metrics.jsonl", "slurm"))


def _status(folder: Path, known: dict[str, QueuedJob]) -> RunStatus:
    rows, steps, damage = _read(folder)
    holder, job = holder_of(folder), _job(folder, known)
    last: Row = next((row for row in reversed(rows) if "event" not in row), {})
    end = rows[-1] if rows and rows[-1].get("event") == "end" else None
    state, detail = "not begun", job.detail if job else ""
    if holder is not None:
        state, detail = "running", job.detail if job else f"process {holder.pid} on {holder.host}"
    elif job is not None and job.active:
        state = job.state.lower()
    elif end is not None:
        state, detail = end.get("outcome", "ended"), end.get("reason", "")
    elif rows or damage or (job is None and os.path.exists(folder / "run.json")):
        state, detail = "killed", detail or _killed(folder)
    elif job is not None:
        state = job.state.lower()
    step = rows[-1]["step"] if rows else None
    left = seconds_left(rows, steps) if holder and steps else None
    # Edits after the end of a finished run do not concern it.
    edited = [] if state == "finished" else changed_sources(folder)
    found = [f"damaged: {sentence}" for sentence in damage]
    found += [f"{path.name} changed since submission" for path in edited[:_SHOWN]]
    found += [f"{len(edited) - _SHOWN} more files changed since submission"] if len(edited) > _SHOWN else []
    detail = "; ".join(filter(None, (detail, *found)))
    number = job.number if job else next(reversed(jobs_of(folder)), None)
    return RunStatus(
        name=folder.name,
        folder=str(folder),
        state=state,
        step=step,
        steps=steps,
        loss=last.get("loss"),
        seconds_left=left,
        job=number,
        detail=detail,
    )


def _killed(folder: Path) -> str:
    """Return a sentence about a run that ended without a report."""
    try:
        saved = step_folders(folder / "checkpoints")
    except OSError as error:
        return f"killed, or lost with its machine; its checkpoints cannot be listed: {error.strerror}"
    if saved:
        return f"killed, or lost with its machine; the same command resumes from step {step_of(saved[-1])}"
    return "killed, or lost with its machine, before a checkpoint was saved; the same command starts at step 0 again"


def seconds_left(rows: Sequence[Row], steps: int) -> float | None:
    """Return the seconds from the newest row until the last step, at the pace of the rows: evaluations and checkpoints
    take their time too. Rows before the pace changed, as on other ranks, do not count. None without a step's row, or
    where the rows make no sense."""
    logged = [row for row in rows if "event" not in row]
    if not logged:
        return None
    last = logged[-1]
    alike = takewhile(lambda row: _is_like(row.get("step_time_s"), last.get("step_time_s")), reversed(logged))
    *_, first = alike
    before, now, done = first.get("elapsed_s"), last.get("elapsed_s"), last["step"] - first["step"]
    pace = last.get("step_time_s") if before is None or now is None or done < 1 else (now - before) / done
    left = None if pace is None else pace * (steps - last["step"])
    return left if left is not None and 0 <= left < math.inf else None


def _is_like(one: float | None, other: float | None) -> bool:
    """Return whether the times of two steps differ by less than a factor of 2, as far as they are known."""
    return not one or not other or 0.5 < one / other < 2


def _job(folder: Path, known: dict[str, QueuedJob]) -> QueuedJob | None:
    """Return the job to report: the first that runs or waits, else the newest."""
    jobs = [known[number] for number in jobs_of(folder) if number in known]
    active = [job for job in jobs if job.active]
    return next(iter(active), jobs[-1] if jobs else None)


def _read(folder: Path) -> tuple[list[Row], int | None, list[str]]:
    """Return a run's last rows, its number of steps, and the damage to its files: one bad run must not hide others."""
    rows: list[Row] = []
    run: dict[str, Any] = {}
    damage: list[str] = []
    try:
        rows, lost = last_rows(folder / "metrics.jsonl")
        damage += [lost] if lost else []
    except OSError as error:
        damage.append(f"metrics.jsonl cannot be read, {reason(error)}")
    try:
        run = checked_run_file(folder)
    except UnreadableError as error:
        damage.append(f"run.json cannot be read, {error}")
    return rows, run.get("steps"), damage


def run_folder(name: Path) -> Path:
    """Return a run's folder: `name` itself, or the folder of that name in `runs`. Raises BadInputError."""
    for folder in (name, Path("runs") / name):
        if folder.is_dir() and _is_run(folder):
            return folder
    near = None if name.is_dir() else near_run(name)
    advice = f"did you mean {near}?" if near else "give its path (logging.dir/name)"
    raise BadInputError(f"{name} is not the folder of a run, nor is there one of that name in runs; {advice}")
