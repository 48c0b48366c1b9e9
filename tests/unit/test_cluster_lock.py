"""One run at a time trains in a folder."""

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from llmtrain.cluster import lock as module
from llmtrain.cluster.lock import LOCK, RunLock, holder_of

HOLD = """
import sys
from pathlib import Path
from llmtrain.cluster.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print(lock.take(), flush=True)
"""


@pytest.fixture
def other(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process that has the folder's lock, until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{HOLD}sys.stdin.read()", str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "None\n"
    return process


def take(folder: Path) -> str:
    """What another process says that tries to take the lock."""
    return subprocess.run([sys.executable, "-c", HOLD, str(folder)], capture_output=True, text=True, check=True).stdout


def test_a_second_one_says_who_has_it(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    before = (tmp_path / LOCK).read_text()
    said = RunLock(tmp_path).take()
    assert said is not None
    assert f"{tmp_path} is being trained in by process {other.pid} of " in said
    assert socket.gethostname() in said
    assert (tmp_path / LOCK).read_text() == before
    held = holder_of(tmp_path)
    assert held is not None
    assert held.pid == other.pid
    other.kill()
    other.wait()


def test_who_asks_neither_takes_the_lock_nor_may_write(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes, really_open = [], os.open

    def note(path: Path, flags: int, mode: int = 0o777) -> int:
        modes.append(flags & os.O_ACCMODE)
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", note)
    monkeypatch.setattr(fcntl, "lockf", lambda *arguments: pytest.fail("the lock was taken"))
    held = holder_of(tmp_path)
    assert held is not None
    assert held.pid == other.pid
    other.kill()
    other.wait()
    assert holder_of(tmp_path) is None
    assert modes == [os.O_RDONLY] * 2


def test_what_a_killed_one_held_is_free(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.kill()
    other.wait()
    assert (tmp_path / LOCK).read_text()
    assert holder_of(tmp_path) is None
    with RunLock(tmp_path) as lock:
        assert lock.take() is None
        assert f"process {os.getpid()} of " in take(tmp_path)
    assert take(tmp_path) == "None\n"


def write(folder: Path, **changes: object) -> None:
    """Leave what a run on another host would."""
    holder = {
        "host": "elsewhere", "pid": 1, "started": 0.0, "user": "she", "job": None, "cluster": "c", "since": "Monday",
        **changes,
    }  # fmt: skip
    (folder / LOCK).write_text(json.dumps(holder))


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool | None], None]:
    """Have this process be job 7, and Slurm say whether other jobs are active."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "c")
    return lambda active: monkeypatch.setattr(module, "still_active", lambda number: active)


def test_another_host_whose_file_system_tells_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    said = RunLock(tmp_path).take()
    assert said == (
        f"{tmp_path} is being trained in by process 1 of she on elsewhere, since Monday; if it has ended, delete "
        f"{tmp_path / LOCK}"
    )


@pytest.mark.parametrize(
    ("changes", "active", "free"),
    [
        ({"job": "6"}, True, False),
        ({"job": "6"}, False, True),
        ({"job": "6"}, None, False),
        ({"job": "6", "cluster": "other"}, False, False),
        ({"job": "7"}, True, True),
    ],
    ids=["runs", "ended", "unknown", "other cluster", "requeued"],
)
def test_jobs_on_other_hosts(
    tmp_path: Path,
    slurm: Callable[[bool | None], None],
    changes: dict[str, str],
    active: bool | None,
    free: bool,
) -> None:
    slurm(active)
    write(tmp_path, **changes)
    assert (holder_of(tmp_path) is None) is free
    said = RunLock(tmp_path).take()
    assert (said is None) is free
    if said is not None:
        assert f"by job {changes['job']}, process 1 of she on elsewhere" in said


def test_after_a_crash_a_login_node_sees_that_the_job_is_over(
    tmp_path: Path, slurm: Callable[[bool | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.delenv("SLURM_CLUSTER_NAME")
    write(tmp_path, job="6")
    slurm(True)
    assert holder_of(tmp_path) is not None
    slurm(False)
    assert holder_of(tmp_path) is None


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    write(tmp_path, host=socket.gethostname(), pid=2**22 + 1)
    assert holder_of(tmp_path) is None
    assert RunLock(tmp_path).take() is None
    # This process is that holder, and lives.
    held = holder_of(tmp_path)
    assert held is not None
    assert held.pid == os.getpid()
    assert "is being trained in by" in (RunLock(tmp_path).take() or "")


def test_a_torn_file_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text('{"host": "else')
    assert RunLock(tmp_path).take() is None
