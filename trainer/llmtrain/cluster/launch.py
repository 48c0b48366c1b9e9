"""Starting this machine's ranks through torch's elastic agent, and stopping them together."""

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from llmtrain.cluster.environment import LAUNCHER_PID, threads_per_rank
from llmtrain.cluster.stop import STOP_SIGNALS
from llmtrain.errors import EXIT_PREEMPTED, RunFailedError

# How long the agent waits for the other ranks once one has ended, in seconds.
GRACE = 60


def launch(ranks: int, arguments: Sequence[str]) -> None:
    """Run `python -m llmtrain ARGUMENTS` as `ranks` ranks of this machine, and return when all have ended well.

    SIGINT, SIGTERM and SIGUSR1 go on to the ranks, which save and end. Raises SystemExit with the code of the first
    rank that ended otherwise, RunFailedError when it was killed.
    """
    os.environ[LAUNCHER_PID] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))
    # The agent logs its own tables; what went wrong is said here, in one sentence.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.launcher").setLevel(logging.CRITICAL)
    for number in STOP_SIGNALS:
        signal.signal(number, _pass_on)
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
        shutdown_timeout=GRACE,
        # The agent's own handlers would end the ranks before they could save.
        signals_to_handle="SIGQUIT",
    )
    try:
        elastic_launch(config, sys.executable)("-m", "llmtrain", *arguments)
    except ChildFailedError as error:
        raise _ending(list(error.failures.values())) from None


def _pass_on(number: int, frame: FrameType | None) -> None:
    for child in psutil.Process().children():
        child.send_signal(number)


def _ending(failures: list[ProcessFailure]) -> BaseException:
    """Return how this process ends. A rank that ended by itself has said why; one that was killed could not."""
    # Ranks that are asked to stop before their first step die of it.
    if any(failure.exitcode in (EXIT_PREEMPTED, -signal.SIGUSR1) for failure in failures):
        return SystemExit(EXIT_PREEMPTED)
    # Ranks that lost one which was killed end without a word in the same second, and may be seen before it. The agent
    # ends others by SIGTERM at once, by SIGKILL after its grace.
    together = [failure for failure in failures if failure.timestamp < min(each.timestamp for each in failures) + GRACE]
    first = min(together, key=lambda failure: (not _killed(failure), failure.timestamp))
    if first.exitcode >= 0:
        return SystemExit(first.exitcode)
    name = signal.Signals(-first.exitcode).name
    return RunFailedError(
        f"rank {first.local_rank} was killed by {name}, so the run stopped; the same command goes on from the last "
        "checkpoint"
    )


def _killed(failure: ProcessFailure) -> bool:
    return failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM


def die_with_launcher() -> None:
    """Have the kernel kill this rank when the process that launched it dies, so that no rank outlives its run."""
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None or sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(launcher):
        os.kill(os.getpid(), signal.SIGKILL)
