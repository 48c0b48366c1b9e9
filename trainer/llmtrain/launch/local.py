"""Start this machine's ranks through torch's elastic agent, stop them together, and restart them."""

import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

import psutil
from llmtrain_data import units
from llmtrain_data.output import leave_terminal, say
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from llmtrain.cluster.control_groups import memory_kills
from llmtrain.cluster.memory import machine_memory
from llmtrain.comm.crash_notes import CRASH_NOTES, CrashNotes, Ending
from llmtrain.comm.device import built_for_amd, gpu_count
from llmtrain.comm.environment import LAUNCHER_PID, STOP_SIGNAL, threads_per_rank
from llmtrain.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    PreemptedError,
    RunFailedError,
)
from llmtrain.launch.monitor import Monitor
from llmtrain.launch.stop import STOPPED_EARLY, stop_signals

# How long torch's agent waits for the other ranks once one has ended, in seconds.
GRACE = 30


@dataclass(frozen=True)
class Restarts:
    """The restart policy. most: restarts in a row without a new checkpoint. newest: returns the newest checkpoint's
    step. fewer: returns the next smaller number of ranks that the recipe allows, or its argument if there is none."""

    most: int
    newest: Callable[[], int | None]
    fewer: Callable[[int], int]

    @property
    def next_step(self) -> str:
        """What the same command does after a failure."""
        newest = self.newest()
        if newest is None:
            return "there is no checkpoint yet, so the same command starts again"
        return f"the same command resumes from step {newest}"


@dataclass(frozen=True)
class _End:
    """How an attempt ended. rank: the lost rank, None if a restart cannot help. why: the reason as text, empty if a
    rank has reported it. code: the exit code of this process. failed_rank: the rank whose GPU may be at fault, None if
    nothing says which."""

    rank: int | None
    why: str = ""
    code: int = EXIT_FAILED
    failed_rank: int | None = None

    def error(self, restarts: Restarts) -> BaseException:
        """Return the exception that ends this process."""
        if not self.why:
            return SystemExit(self.code)
        if self.code == EXIT_PREEMPTED:
            return PreemptedError(self.why)
        return RunFailedError(f"{self.why}, so the run stopped; {restarts.next_step}")


class _NoLogs(LogsSpecs):
    """Makes ranks write to this process's stdout and stderr; torch's default creates a folder for each run."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return no log files for the ranks. envs: each rank's environment, by local rank."""
        here, none = dict.fromkeys(envs, ""), dict.fromkeys(envs, os.devnull)
        return LogsDest(stdouts=here, stderrs=here, error_files=none)

    @property
    def root_log_dir(self) -> str:
        """No folder."""
        return os.devnull


class _Signals:
    """Forwards stop signals to the ranks, which save and end; a second SIGINT ends them immediately.
    asked: whether a signal has arrived. interrupts: the number of SIGINTs."""

    def __init__(self) -> None:
        self.asked, self.interrupts = False, 0
        os.environ[STOP_SIGNAL], self._heeded = "", stop_signals()
        for number in self._heeded:
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if number == signal.SIGHUP:
            leave_terminal()
        self.interrupts += number == signal.SIGINT
        # Ranks that start later read it. A rank whose environment was copied just before misses it, and the agent
        # ends it with the others.
        os.environ[STOP_SIGNAL] = str(number)
        for child in psutil.Process().children():
            child.send_signal(number)

    def ignore(self) -> None:
        """Ignore further signals while this process ends: they would change its exit code."""
        for number in self._heeded:
            signal.signal(number, signal.SIG_IGN)


def launch(ranks: int, arguments: Sequence[str], restarts: Restarts | None = None) -> None:
    """Run `python -m llmtrain ARGUMENTS` as `ranks` ranks on this machine, and return when all have succeeded.

    Forwards stop signals to the ranks, which save and end. Raises SystemExit with the exit code of the
    first rank that failed, RunFailedError if that rank was killed or hung and no restart is left, and KeyboardInterrupt
    if SIGINT came before there was anything to save, or a second one before the save was complete.
    """
    os.environ[LAUNCHER_PID] = str(os.getpid())
    # The agent logs tables; this launcher reports a failure in one sentence instead.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.launcher").setLevel(logging.CRITICAL)
    restarts = restarts or Restarts(0, lambda: None, lambda ranks: ranks)
    signals, threads = _Signals(), os.environ.get("OMP_NUM_THREADS")
    tried, before, lost = 0, restarts.newest(), None
    while True:
        os.environ["OMP_NUM_THREADS"] = threads or str(threads_per_rank(ranks))
        end = _attempt(ranks, arguments, signals)
        if end is None:
            return signals.ignore()
        newest = restarts.newest()
        if newest != before:
            tried, before, lost = 0, newest, None
        if end.rank is None or signals.asked or tried == restarts.most:
            signals.ignore()
            at_once = signals.interrupts > 1 and end.code != EXIT_PREEMPTED
            raise KeyboardInterrupt if at_once or end.code == EXIT_INTERRUPTED else end.error(restarts)
        tried += 1
        if end.failed_rank is not None and end.failed_rank == lost and (fewer := restarts.fewer(ranks)) < ranks:
            _leave_out(end.failed_rank)
            # From now on, the same number is another GPU's rank.
            ranks, lost = fewer, None
        else:
            lost = end.failed_rank
        again = "from the start" if newest is None else f"from step {newest}"
        why = end.why or f"rank {end.rank} ended with exit code {end.code}"
        say(f"llmtrain: {why}; restart {tried} of {restarts.most} {again} on {ranks} ranks", err=True)


def _attempt(ranks: int, arguments: Sequence[str], signals: _Signals) -> _End | None:
    """Run the ranks once; return how they ended, None for success."""
    notes = CrashNotes(ranks)
    if notes.path is not None:
        os.environ[CRASH_NOTES] = notes.path
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=_NoLogs(),
        # The agent's own handlers would end the ranks before they could save.
        signals_to_handle="SIGQUIT",
    )
    monitor, kills = Monitor(ranks, notes), memory_kills()
    try:
        elastic_launch(config, sys.executable)("-P", "-m", "llmtrain", *arguments)
    except ChildFailedError as error:
        monitor.close()
        # Leave out the ranks that the monitor killed: they did not cause the failure. The agent may know of no others.
        failures = [failure for failure in error.failures.values() if failure.pid not in monitor.killed]
        failures = failures or list(error.failures.values())
        first = _first(failures, monitor)
        return _stopped(failures, first, signals.asked) or _ending(
            failures, first, notes, monitor, memory_kills() > kills
        )
    finally:
        monitor.close()
        notes.close()
    return None


def _first(failures: list[ProcessFailure], monitor: Monitor) -> ProcessFailure:
    """Return the failure that caused the others."""
    # Ranks that lose a killed peer end in the same second, and the agent may see them first.
    died = [failure for failure in failures if failure.pid in monitor.died] or failures
    return min(died, key=lambda failure: (not _killed(failure), failure.timestamp))


def _stopped(failures: list[ProcessFailure], first: ProcessFailure, asked: bool) -> _End | None:
    """Return how a run ended after a stop signal; None if it ended otherwise. asked: whether this process received the
    signal too, and not only its ranks."""
    codes = {failure.exitcode for failure in failures}
    if EXIT_PREEMPTED in codes:
        return _End(None, code=EXIT_PREEMPTED)
    if codes & {EXIT_INTERRUPTED, -signal.SIGINT}:
        return _End(None, code=EXIT_INTERRUPTED)
    # A stop signal kills a rank that is still starting. SIGTERM may also come from the agent.
    if codes & {-signal.SIGUSR1, -signal.SIGHUP} or (asked and first.exitcode == -signal.SIGTERM):
        return _End(None, STOPPED_EARLY, EXIT_PREEMPTED)
    return None


def _ending(
    failures: list[ProcessFailure], first: ProcessFailure, notes: CrashNotes, monitor: Monitor, ran_out: bool
) -> _End:
    """Return how the run ended. A rank that ended by itself has reported why; a killed rank could not. ran_out: whether
    the kernel has killed a process because memory ran out."""
    rank, last = first.local_rank, notes.last(first.local_rank)
    # After a rank has died, the other ranks' reasons only describe its death.
    reason = monitor.reason if monitor.died else notes.reason
    if reason.sentence:
        # The rank that ended first may be one that waited for the failed rank.
        return _End(rank, reason.sentence, failed_rank=reason.rank)
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        why = f"rank {rank} was killed by {name} on {socket.gethostname()} {last}"
        if ran_out and first.exitcode == -signal.SIGKILL:
            return _End(rank, f"{why}, as memory ran out ({_advice()})")
        return _End(rank, why, failed_rank=rank)
    # The agent sends the other ranks SIGTERM immediately and SIGKILL after GRACE.
    together = [failure for failure in failures if failure.timestamp < first.timestamp + GRACE]
    endings = {failure.local_rank: notes.last(failure.local_rank).ending for failure in together}
    for failure in together:
        if endings[failure.local_rank] == Ending.REPORTED or failure.exitcode == EXIT_BAD_INPUT:
            return _End(None, code=failure.exitcode)
    for failure in together:
        if (ending := endings[failure.local_rank]) in (Ending.CRASHED, Ending.OUT_OF_MEMORY):
            failed_rank = None if ending == Ending.OUT_OF_MEMORY else failure.local_rank
            return _End(failure.local_rank, code=failure.exitcode, failed_rank=failed_rank)
    if Ending.LOST in endings.values():
        return _End(rank, f"the ranks lost contact with each other {last}")
    return _End(rank, code=first.exitcode, failed_rank=rank)


def _advice() -> str:
    """Return what takes less of this machine's memory."""
    less = "offload less to the host, or set offload.spare=0" if gpu_count() else "take a smaller train.microbatch"
    return f"there are {units.size(machine_memory())} for this run; {less}"


def _killed(failure: ProcessFailure) -> bool:
    return failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM


def _leave_out(rank: int) -> None:
    """Hide the GPU of a rank that was lost twice in a row from the next attempts."""
    count = gpu_count()
    if count:
        # On AMD's GPUs, torch heeds the first of these that is set, and Slurm sets the second.
        amd = [
            name for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if name in os.environ and built_for_amd()
        ]
        name = (*amd, "CUDA_VISIBLE_DEVICES")[0]
        visible = os.environ.get(name, ",".join(map(str, range(count)))).split(",")
        os.environ[name] = ",".join(visible[:rank] + visible[rank + 1 :])


def die_with_launcher() -> None:
    """Have the kernel kill this rank when the process that launched it dies, so that no rank outlives its run."""
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None or sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(launcher):
        os.kill(os.getpid(), signal.SIGKILL)
