"""Runs inputs through a reader in a forked process with limits of time and memory, and keeps the inputs that break it.

A reader may accept the input, or raise one of the errors that the command line prints as a sentence. Anything else is a
find: another exception, a crash, 5 s of CPU time, a minute of wall time, or 500 MB of memory.
"""

import hashlib
import json
import mmap
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from llmtrain.errors import CommandError
from llmtrain_data.errors import DataError

from tools.fuzz.cases import Case
from tools.fuzz.targets import Target

SECONDS, WALL_SECONDS, BYTES = 5, 60, 500 * 1000**2
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Find:
    """An input that a reader neither accepted nor rejected. what: one line. trace: the traceback, if there is one."""

    reader: str
    seed: int
    index: int
    what: str
    trace: str

    @property
    def kind(self) -> str:
        """The error's type and its innermost frame in the repository; equal for finds with one cause."""
        frames = [line.strip() for line in self.trace.splitlines() if line.strip().startswith("File")]
        ours = [frame for frame in frames if str(_ROOT) in frame and "tools/fuzz" not in frame]
        return f"{self.what.partition(':')[0]} {(ours or frames or [''])[-1]}"


def case_of(target: Target, seed: int, index: int) -> Case:
    """Return an input; the same numbers give the same input."""
    return target.case(Random(f"{target.name}/{seed}/{index}"))


def run(target: Target, seed: int, indices: range, finds: Path | None = None) -> Iterator[Find]:
    """Run inputs in forked processes, and yield the finds. finds: folder for their inputs."""
    progress = mmap.mmap(-1, 8)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        start = indices.start
        while start < indices.stop:
            notes = folder / "notes"
            progress[:] = start.to_bytes(8, "little")
            status = _in_a_fork(target, seed, range(start, indices.stop), progress, folder)
            found = [Find(**json.loads(line)) for line in _lines(notes)]
            reached = int.from_bytes(progress[:], "little")
            if status != 0:
                found.append(Find(target.name, seed, reached, _ended(status), ""))
            for find in found:
                if finds is not None:
                    keep(find, case_of(target, seed, find.index), finds)
                yield find
            start = reached + 1 if status != 0 else indices.stop
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    path.unlink()
    return lines


def _ended(status: int) -> str:
    number = os.waitstatus_to_exitcode(status)
    if number == -signal.SIGPROF:
        return f"took more than {SECONDS} s of CPU time"
    if number == -signal.SIGALRM:
        return f"took more than {WALL_SECONDS} s"
    return f"ended the process with {number}"


def _in_a_fork(target: Target, seed: int, indices: range, progress: mmap.mmap, folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        try:
            _read_all(target, seed, indices, progress, folder)
            os._exit(0)
        except BaseException as error:
            # An error of the fuzzer itself: report it with the input.
            find = Find(
                target.name, seed, int.from_bytes(progress[:], "little"), f"fuzzer: {error}", traceback.format_exc()
            )
            with open(folder / "notes", "a") as notes:
                notes.write(json.dumps(asdict(find)) + "\n")
            os._exit(77)
    return os.waitpid(child, 0)[1]


def _read_all(target: Target, seed: int, indices: range, progress: mmap.mmap, folder: Path) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    # The default actions end the process even if it is in native code.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    target.prepare()
    limit = _data_bytes() + BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    here = folder / "here"
    with open(folder / "notes", "a") as notes:
        for index in indices:
            progress[:] = index.to_bytes(8, "little")
            case = case_of(target, seed, index)
            target.write(case, here)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
            find = _read(target, case, here)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            if find is not None:
                notes.write(json.dumps(asdict(Find(target.name, seed, index, *find))) + "\n")
                notes.flush()


def _read(target: Target, case: Case, folder: Path) -> tuple[str, str] | None:
    """Return the error and its traceback, None if there is no find."""
    try:
        target.read(folder, case)
    except (CommandError, DataError) as error:
        return None if str(error).strip() else ("empty message", traceback.format_exc())
    except OSError:
        return None
    except BaseException as error:  # a Rust panic is a BaseException
        return f"{type(error).__name__}: {str(error)[:300]}", traceback.format_exc()
    return None


def _data_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData"):
            return int(line.split()[1]) * 1024
    return 0


def keep(find: Find, case: Case, finds: Path) -> Path:
    """Write a find and its input into a new folder, at most 5 per kind; return the folder."""
    name = hashlib.sha256(find.kind.encode()).hexdigest()[:8]
    folder = finds / find.reader / name / f"{find.seed}-{find.index}"
    if len(list(folder.parent.glob("*"))) < 5:
        for path, content in case.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "find.txt").write_text(f"{find.what}\n{case.words}\n{find.trace}\n", errors="backslashreplace")
    return folder


def summary(finds: Sequence[Find]) -> list[str]:
    """Return an entry for each kind of find: count, first input, error, kind."""
    kinds: dict[str, list[Find]] = {}
    for find in finds:
        kinds.setdefault(find.kind, []).append(find)
    return [
        f"{len(each):>6} x {each[0].reader} {each[0].seed}/{each[0].index}: {each[0].what}\n         {kind}"
        for kind, each in kinds.items()
    ]


def rate(started: float, done: int) -> str:
    """Return the inputs per second as text."""
    return f"{done / max(time.monotonic() - started, 1e-9):.0f} inputs/s"
