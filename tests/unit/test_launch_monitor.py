"""The launcher's monitor of its ranks' processes, and what it says of a run that failed."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from llmtrain.comm.crash_notes import CRASH_NOTES, CrashNote, CrashNotes, Ending, EndReason, Last, write_reason
from llmtrain.errors import RunFailedError
from llmtrain.launch import local
from llmtrain.launch.local import Restarts
from llmtrain.launch.monitor import Monitor
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure


def has_seen(monitor: Monitor, process: subprocess.Popen[bytes], patience: float) -> bool:
    """Return whether a monitor takes a process that ends at once for a rank that died, within `patience` seconds."""
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    end = time.monotonic() + patience
    while not monitor.died and time.monotonic() < end:
        time.sleep(0.01)
    return process.pid in monitor.died


@pytest.mark.parametrize("earlier", [False, True])
def test_a_rank_that_died_before_it_was_looked_at_has_died(earlier: bool) -> None:
    """A child from before the ranks were started is no rank. Process 1 of a container adopts such children."""
    notes = CrashNotes(2)
    process = subprocess.Popen(["true"]) if earlier else None
    monitor = Monitor(2, notes)
    process = process or subprocess.Popen(["true"])
    try:
        assert has_seen(monitor, process, 0.5 if earlier else 20) is not earlier
    finally:
        monitor.close()
        notes.close()
        process.wait()


def test_an_adopted_process_with_the_environment_of_a_rank_is_no_rank() -> None:
    """Such as what a killed rank had started: it may end while the new ranks start."""
    notes = CrashNotes(2)
    process = subprocess.Popen(["sleep", "100"], env={**os.environ, "LOCAL_RANK": "0"})
    while "LOCAL_RANK" not in psutil.Process(process.pid).environ():
        time.sleep(0.01)
    monitor = Monitor(2, notes)
    try:
        time.sleep(0.2)
        process.kill()
        assert not has_seen(monitor, process, 0.5)
    finally:
        monitor.close()
        notes.close()
        process.wait()


@pytest.mark.parametrize(
    ("newest", "said"),
    [
        (None, "there is no checkpoint yet, so the same command starts again"),
        (20, "the same command resumes from step 20"),
    ],
)
def test_what_the_same_command_does(newest: int | None, said: str) -> None:
    assert Restarts(0, lambda: newest, lambda ranks: ranks).next_step == said


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A launcher on two GPUs whose rank 1 is ended by a signal each time. signal: its number. kills: processes that the
    kernel has killed, and those that it kills in each attempt. reason: left by a rank in each attempt, if any. ranks:
    of each attempt. gpus: seen by each attempt."""
    state: dict[str, Any] = {"signal": signal.SIGKILL, "kills": 3, "more": 1, "ranks": [], "gpus": []}
    state["reason"] = None

    def elastic_launch(config: Any, executable: str) -> Callable[..., None]:
        def run(*arguments: str) -> None:
            state["ranks"].append(config.nproc_per_node)
            state["gpus"].append(os.environ.get("CUDA_VISIBLE_DEVICES"))
            state["kills"] += state["more"]
            if state["reason"] is not None:
                write_reason(os.environ[CRASH_NOTES], state["reason"])
            failure = ProcessFailure(local_rank=1, pid=2**22, exitcode=-state["signal"], error_file="<N/A>")
            raise ChildFailedError("llmtrain", {1: failure})

        return run

    class Signals:
        asked, interrupts = False, 0

        def ignore(self) -> None:
            pass

    monkeypatch.setattr(local, "elastic_launch", elastic_launch)
    monkeypatch.setattr(local, "_Signals", Signals)
    monkeypatch.setattr(local, "memory_kills", lambda: state["kills"])
    monkeypatch.setattr(local, "machine_memory", lambda: 480 * 2**30)
    monkeypatch.setattr(local, "gpu_count", lambda: 2)
    for name in ("LLMTRAIN_LAUNCHER_PID", "LLMTRAIN_NOTES", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        # Both calls, so that the variable is gone afterwards.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return state


OUT = ", as memory ran out (there are 480 GiB for this run; offload less to the host, or set offload.spare=0)"


@pytest.mark.parametrize(
    ("number", "more", "said"),
    [(signal.SIGKILL, 1, OUT), (signal.SIGKILL, 0, ""), (signal.SIGSEGV, 1, "")],
    ids=["memory", "other", "segv"],
)
def test_a_kill_as_memory_ran_out_is_called_one(
    number: signal.Signals, more: int, said: str, launcher: dict[str, Any]
) -> None:
    launcher |= {"signal": number, "more": more}
    with pytest.raises(RunFailedError) as error:
        local.launch(2, [])
    assert f"rank 1 was killed by {number.name} on " in str(error.value)
    assert f" after step 0, in starting{said}, so the run stopped; " in str(error.value)


def test_a_run_whose_ranks_were_all_killed_by_the_monitor_is_told(
    launcher: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = SimpleNamespace(died=[2**21], killed={2**22}, reason=EndReason(), close=lambda: None)
    monkeypatch.setattr(local, "Monitor", lambda ranks, notes: monitor)
    with pytest.raises(RunFailedError, match="rank 1 was killed by SIGKILL on "):
        local.launch(2, [])


@pytest.mark.parametrize(("ending", "failed_rank"), [(Ending.OUT_OF_MEMORY, None), (Ending.CRASHED, 1)])
def test_a_gpu_whose_memory_ran_out_is_not_at_fault(ending: Ending, failed_rank: int | None) -> None:
    notes = CrashNotes(2)
    CrashNote(notes.path, 1).write(Last(3, "step", ending))
    failure = ProcessFailure(local_rank=1, pid=2**22, exitcode=1, error_file="<N/A>")
    monitor: Any = SimpleNamespace(died=set(), reason=EndReason())
    found = local._ending([failure], failure, notes, monitor, False)
    notes.close()
    assert (found.rank, found.failed_rank) == (1, failed_rank)


def test_a_kill_as_memory_ran_out_hides_no_gpu(launcher: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Without it, the second loss of a rank does."""
    for more, ranks, gpus in ((1, [2, 2, 2], [None] * 3), (0, [2, 2, 1], [None, None, "0"])):
        launcher |= {"more": more, "ranks": [], "gpus": []}
        with pytest.raises(RunFailedError):
            local.launch(2, [], Restarts(2, lambda: None, lambda ranks: ranks - 1))
        assert (launcher["ranks"], launcher["gpus"]) == (ranks, gpus)
    assert capsys.readouterr().err.count("as memory ran out") == 2


@pytest.mark.parametrize(
    ("failed_rank", "ranks", "gpus"), [(0, [2, 2, 1], [None, None, "1"]), (None, [2, 2, 2], [None] * 3)]
)
def test_the_gpu_of_the_rank_that_hangs_is_hidden(
    failed_rank: int | None, ranks: list[int], gpus: list[str | None], launcher: dict[str, Any]
) -> None:
    """Not of the one that ends first after the reason; none where the reason names no rank."""
    launcher |= {"reason": EndReason("nothing has moved", failed_rank)}
    with pytest.raises(RunFailedError, match=r"^nothing has moved, so the run stopped"):
        local.launch(2, [], Restarts(2, lambda: None, lambda ranks: ranks - 1))
    assert (launcher["ranks"], launcher["gpus"]) == (ranks, gpus)


def test_after_a_gpu_is_left_out_a_loss_counts_anew(launcher: dict[str, Any]) -> None:
    """Ranks are then numbered anew, so that the same number is another GPU's."""
    launcher |= {"more": 0}
    with pytest.raises(RunFailedError):
        local.launch(4, [], Restarts(4, lambda: None, lambda ranks: ranks - 1))
    assert launcher["ranks"] == [4, 4, 3, 3, 2]


@pytest.mark.parametrize(
    ("amd", "given", "expected"),
    [
        (True, {"ROCR_VISIBLE_DEVICES": "4,5"}, {"ROCR_VISIBLE_DEVICES": "4"}),
        (True, {"HIP_VISIBLE_DEVICES": "4,5", "ROCR_VISIBLE_DEVICES": "0,1"}, {"HIP_VISIBLE_DEVICES": "4"}),
        (True, {}, {"CUDA_VISIBLE_DEVICES": "0"}),
        (False, {"ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "6,7"}, {"CUDA_VISIBLE_DEVICES": "6"}),
    ],
)
def test_a_gpu_is_left_out_of_the_variable_that_counts(
    amd: bool,
    given: dict[str, str],
    expected: dict[str, str],
    launcher: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "built_for_amd", lambda: amd)
    names = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    for name in names:
        monkeypatch.setenv(name, given.get(name, ""))
        if name not in given:
            monkeypatch.delenv(name)
    local._leave_out(1)
    assert {name: os.environ[name] for name in names if name in os.environ} == {**given, **expected}
