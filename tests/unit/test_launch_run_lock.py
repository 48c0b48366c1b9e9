"""Only one run at a time trains in a folder."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from llmtrain.errors import RunFailedError
from llmtrain.launch import lock_holder as holder_module
from llmtrain.launch import run_lock as module
from llmtrain.launch.lock_holder import parse, this_process
from llmtrain.launch.run_lock import FEWEST_LOOKS, LOCK, LOCKLESS_LOOKS, UNLOCKED_LOOKS, RunLock, holder_of, locked_by

HOLD = """
import sys
from pathlib import Path
from llmtrain.launch.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print(lock.take(print), flush=True)
"""


@dataclass
class Pauses:
    """Replaces the pauses between looks. during: calls in the n-th pause, counted from 1."""

    during: dict[int, Callable[[], object]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def __call__(self, why: str) -> None:
        self.said.append(why)
        self.during.get(len(self.said), lambda: None)()


def never(why: str) -> None:
    pytest.fail(f"it waited: {why}")


@pytest.fixture
def other(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process that holds the folder's lock until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{HOLD}sys.stdin.read()", str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "None\n"
    return process


def take(folder: Path) -> str:
    """Return the output of another process that tries to take the lock."""
    return subprocess.run([sys.executable, "-c", HOLD, str(folder)], capture_output=True, text=True, check=True).stdout


def test_a_second_one_says_who_has_it(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    before = (tmp_path / LOCK).read_text()
    said = RunLock(tmp_path).take(never)
    assert said is not None
    assert f"{tmp_path} is being trained in by process {other.pid} of " in said
    assert socket.gethostname() in said
    assert (tmp_path / LOCK).read_text() == before
    assert locked_by(tmp_path) == holder_of(tmp_path)
    held = holder_of(tmp_path)
    assert held is not None
    assert held.pid == other.pid
    other.kill()
    other.wait()


def test_a_disk_that_is_gone_does_not_hide_what_ended_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise OSError(5, "Input/output error")

    lock = RunLock(tmp_path)
    assert lock.take(print) is None
    with monkeypatch.context() as changed:
        changed.setattr("os.ftruncate", gone)
        lock.release()
    again = RunLock(tmp_path)
    assert again.take(lambda _: time.sleep(0.01)) is None
    again.release()


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
        assert lock.take(never) is None
        assert f"process {os.getpid()} of " in take(tmp_path)
    assert take(tmp_path) == "None\n"


def write(folder: Path, age: float = 0.0, **changes: object) -> None:
    """Write the lock file of a run on another host that renewed its lease `age` seconds ago."""
    holder = {
        "host": "elsewhere", "pid": 1, "started": 0.0, "user": "she", "job": None, "cluster": "c", "since": "Monday",
        "place": "another boot", **changes,
    }  # fmt: skip
    (folder / LOCK).write_text(json.dumps(holder))
    os.utime(folder / LOCK, (time.time() - age,) * 2)


def renew(folder: Path) -> Callable[[], None]:
    return lambda: os.utime(folder / LOCK)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[str] | None], None]:
    """Make this process job 7, and let a test set Slurm's answer, the states of other jobs."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "c")
    return lambda states: monkeypatch.setattr(holder_module, "job_states", lambda number: states)


def no_locks(*arguments: object) -> None:
    raise OSError(37, "No locks available")


def write_at(folder: Path, age: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a lease of that age, and freeze the clock."""
    write(folder, age)
    written = (folder / LOCK).stat().st_mtime
    monkeypatch.setattr(module.time, "time", lambda: written + age)


@pytest.fixture
def lockless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "lockf", no_locks)
    monkeypatch.setattr(fcntl, "fcntl", no_locks)


@pytest.mark.parametrize(
    ("age", "looks"), [(0.0, UNLOCKED_LOOKS), (4.5, UNLOCKED_LOOKS - 4), (1e6, FEWEST_LOOKS), (-1e6, UNLOCKED_LOOKS)]
)
def test_a_lease_of_another_host_that_nobody_renews(
    tmp_path: Path, age: float, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However wrong the clock, the start watches the lease for a while, and not longer than needed."""
    write_at(tmp_path, age, monkeypatch)
    pauses = Pauses()
    assert RunLock(tmp_path).take(pauses) is None
    (said,) = set(pauses.said)
    assert said == (
        f"{tmp_path} was last trained in by process 1 of she on elsewhere, since Monday; "
        f"waiting up to {looks} s to see whether it has ended"
    )
    assert len(pauses.said) == looks
    assert parse((tmp_path / LOCK).read_bytes()) is not None
    assert os.listdir(tmp_path) == [LOCK]


@pytest.mark.usefixtures("lockless")
def test_a_lease_where_the_file_system_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_at(tmp_path, 3.5, monkeypatch)
    pauses = Pauses()
    assert RunLock(tmp_path).take(pauses) is None
    assert len(pauses.said) == LOCKLESS_LOOKS - 3


@pytest.mark.parametrize("age", [0.0, 1e6])
@pytest.mark.parametrize("look", [1, FEWEST_LOOKS])
def test_a_lease_of_another_host_that_is_renewed(tmp_path: Path, age: float, look: int) -> None:
    write(tmp_path, age)
    pauses = Pauses({look: renew(tmp_path)})
    said = RunLock(tmp_path).take(pauses)
    assert said is not None
    assert said.startswith(f"{tmp_path} is being trained in by process 1 of she on elsewhere, since Monday; stop it ")
    assert len(pauses.said) == look


def test_the_lease_of_an_earlier_version(tmp_path: Path) -> None:
    """The earlier version has no place in its lock file, also on this host, and does not renew the lease."""
    write(tmp_path, 1e6, host=socket.gethostname())
    content = json.loads((tmp_path / LOCK).read_text())
    del content["place"]
    (tmp_path / LOCK).write_text(json.dumps(content))
    pauses = Pauses()
    assert RunLock(tmp_path).take(pauses) is None
    assert len(pauses.said) == UNLOCKED_LOOKS


def test_hosts_of_one_name_are_not_one(tmp_path: Path) -> None:
    write(tmp_path, host=socket.gethostname(), pid=os.getpid(), started=this_process({}).started)
    assert holder_of(tmp_path) is not None
    said = RunLock(tmp_path).take(Pauses({1: renew(tmp_path)}))
    assert said is not None
    write(tmp_path, 1e6, host="a new name", place=this_process({}).place, pid=2**22 + 1)
    assert RunLock(tmp_path).take(never) is None


def test_a_holder_renews_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEWAL", 0.01)
    with RunLock(tmp_path) as lock:
        assert lock.take(never) is None
        before, content = (tmp_path / LOCK).stat().st_mtime_ns, (tmp_path / LOCK).read_bytes()
        end = time.monotonic() + 30
        while (tmp_path / LOCK).stat().st_mtime_ns == before:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert (tmp_path / LOCK).read_bytes() == content
        lock.confirm()
    assert (tmp_path / LOCK).read_bytes() == b""
    assert holder_of(tmp_path) is None


@pytest.mark.parametrize("deleted", [False, True])
def test_a_holder_that_stood_still_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: bool) -> None:
    """Another run has taken the folder. The first run finds out before it renames a checkpoint, or at its next renewal,
    and does not touch the other run's lock."""
    monkeypatch.setattr(module, "RENEWAL", 0.01)
    said = "is now being trained in by process 1 of she on elsewhere, .* which took it while this run stood still"
    with RunLock(tmp_path) as lock, RunLock(tmp_path) as second:
        assert lock.take(never) is None
        lock.check()
        if deleted:
            (tmp_path / LOCK).unlink()
            lock.confirm()
        write(tmp_path)
        with pytest.raises(RunFailedError, match=said):
            lock.confirm()
        (tmp_path / LOCK).unlink()
        assert second.take(never) is None
        second.confirm()
        write(tmp_path)
        with pytest.raises(RunFailedError, match=said):
            until_it_raises(second.check)
    assert json.loads((tmp_path / LOCK).read_text())["host"] == "elsewhere"


def until_it_raises(look: Callable[[], None]) -> None:
    """Call `look` until it raises: the thread that renews the lock may need a moment."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        look()
        time.sleep(0.01)


def test_a_start_gives_way_to_another_that_is_about_to_take_the_folder(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    claim = tmp_path / f"{LOCK}.{(tmp_path / LOCK).stat().st_mtime_ns}-0"
    claim.touch()
    pauses = Pauses({2: lambda: write(tmp_path), 4: renew(tmp_path)})
    said = RunLock(tmp_path).take(pauses) or ""
    assert f"{tmp_path} is being trained in by process 1 of she on elsewhere, since Monday; stop it " in said
    assert pauses.said[0].startswith(f"another start is about to train in {tmp_path}; waiting up to 10 s")
    assert len(pauses.said) == 4


def test_a_start_that_died_about_to_take_the_folder(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    for turn in range(2):
        (tmp_path / f"{LOCK}.{(tmp_path / LOCK).stat().st_mtime_ns}-{turn}").touch()
    pauses = Pauses()
    assert RunLock(tmp_path).take(pauses) is None
    assert len(pauses.said) == 2 * (UNLOCKED_LOOKS + 1)
    assert os.listdir(tmp_path) == [LOCK]


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        "null",
        "[1]",
        '{"host": "else',
        '{"host": 1, "pid": 1, "started": 0, "user": "x", "job": null, "cluster": null, "since": "y"}',
        '{"host": "x", "pid": 1e400, "started": 0, "user": "x", "job": null, "cluster": null, "since": "y"}',
        '{"host": "x", "pid": 1, "started": NaN, "user": "x", "job": null, "cluster": null, "since": "y"}',
        '{"host": "x", "pid": 1'
        + "0" * 400
        + ', "started": 0, "user": "x", "job": null, "cluster": null, "since": "y"}',
        '{"host": "x", "pid": 1, "started": 0, "user": "x", "job": "--all", "cluster": null, "since": "y"}',
        '{"host": "\ud800", "pid": 1, "started": 0, "user": "x", "job": null, "cluster": null, "since": "y"}',
        "\x00\xff",
    ],
    ids=lambda content: content[:40],
)
def test_a_file_that_no_run_wrote_holds_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK).write_bytes(content.encode(errors="surrogatepass"))
    assert holder_of(tmp_path) is None
    with RunLock(tmp_path) as lock:
        assert lock.take(never) is None
        held = parse((tmp_path / LOCK).read_bytes())
        assert held is not None
        assert held.pid == os.getpid()


def test_what_is_no_file_holds_nothing_and_is_told_of(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK)
    assert holder_of(tmp_path) is None
    with pytest.raises(OSError, match="Illegal seek"):
        RunLock(tmp_path).take(never)


@pytest.mark.parametrize(
    ("changes", "states", "free"),
    [
        ({"job": "6"}, {"RUNNING"}, False),
        ({"job": "6"}, {"FAILED"}, True),
        ({"job": "6"}, set(), True),
        ({"job": "6"}, None, False),
        ({"job": "6", "cluster": "other"}, {"FAILED"}, False),
        ({"job": "7"}, {"RUNNING"}, True),
        ({"job": "7", "restart": "1"}, {"RUNNING"}, False),
    ],
    ids=["runs", "ended", "forgotten", "unknown", "other cluster", "requeued", "another step"],
)
def test_jobs_on_other_hosts(
    tmp_path: Path,
    slurm: Callable[[set[str] | None], None],
    changes: dict[str, str],
    states: set[str] | None,
    free: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slurm(states)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    write(tmp_path, age=0.0, **changes)
    assert (holder_of(tmp_path) is None) is free
    # Unless Slurm knows that the job is over, the lease decides.
    pauses = Pauses({1: renew(tmp_path)})
    said = RunLock(tmp_path).take(pauses)
    assert len(pauses.said) == (not free)
    assert (said is None) is free
    if said is not None:
        assert f"by job {changes['job']}, process 1 of she on elsewhere" in said


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED"])
def test_a_job_that_goes_on_without_a_sign(state: str, tmp_path: Path, slurm: Callable[..., None]) -> None:
    """A run was killed in an interactive allocation, or is suspended and renews no lease."""
    slurm({state})
    write(tmp_path, age=3600.0, job="6")
    assert (holder_of(tmp_path) is None) is (state == "RUNNING")
    pauses = Pauses({})
    said = RunLock(tmp_path).take(pauses)
    assert bool(pauses.said) is (said is None) is (state == "RUNNING")


def test_after_a_crash_a_login_node_sees_that_the_job_is_over(
    tmp_path: Path, slurm: Callable[[set[str] | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.delenv("SLURM_CLUSTER_NAME")
    write(tmp_path, job="6")
    slurm({"RUNNING"})
    assert holder_of(tmp_path) is not None
    slurm(set())
    assert holder_of(tmp_path) is None


@pytest.mark.usefixtures("lockless")
def test_a_file_system_without_locks(tmp_path: Path) -> None:
    write(tmp_path, place=this_process({}).place, pid=2**22 + 1)
    assert holder_of(tmp_path) is None
    with RunLock(tmp_path) as lock:
        assert lock.take(never) is None
        # This process is the holder, and it lives.
        held = holder_of(tmp_path)
        assert held is not None
        assert held.pid == os.getpid()
        assert "is being trained in by" in (RunLock(tmp_path).take(never) or "")


def test_a_holder_is_told_in_one_line() -> None:
    holder = replace(this_process({}), host="here\nllmtrain: all is well", user="she\r\n", since="Monday\n")
    assert str(holder).splitlines() == [str(holder)]
    assert "on here llmtrain: all is well, since Monday" in str(holder)
