"""The content of a run's `lock` file: which process trains in the folder, and whether it has ended. No torch."""

import getpass
import os
import socket
import time
from collections.abc import Mapping
from typing import Annotated

import psutil
from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from llmtrain.launch.slurm.queue import ENDED, job_states

# Later versions may add fields.
_STRICT = ConfigDict(extra="ignore", strict=True)


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class Holder:
    """The process that trains in a folder. started: its start in seconds since 1970. job, cluster: Slurm's number of
    the job and name of the cluster, None outside of Slurm. since: when it took the lock. place: its boot and pid
    namespace (see `_place`), empty if unknown. restart: how often Slurm has started the job again."""

    host: str
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    started: FiniteFloat
    user: str
    job: Annotated[str, Field(pattern=r"^\d{1,20}$")] | None
    cluster: str | None
    since: str
    place: str = ""
    restart: str = ""

    def __str__(self) -> str:
        job = f"job {self.job}, " if self.job else ""
        text = f"{job}process {self.pid} of {self.user} on {self.host}, since {self.since}"
        # A newline in an untrusted file must not start a line of our output.
        return " ".join(text.split())


def parse(content: bytes) -> Holder | None:
    """Return the holder that a file names, None if it names none or is damaged."""
    try:
        return TypeAdapter(Holder).validate_json(content)
    except ValidationError:
        return None


def encode(holder: Holder) -> bytes:
    """Return a holder in the form that `parse` reads."""
    return TypeAdapter(Holder).dump_json(holder)


def is_gone(holder: Holder, unlocked: bool | None) -> bool | None:
    """Return whether a holder has ended, None if neither this machine nor Slurm knows.

    unlocked: whether the kernel reports that no process has the lock, None if the file system has no locks.
    """
    mine = this_process(os.environ)
    if holder.place == mine.place:
        return unlocked is True or not _lives(holder)
    # Outside a job this process does not know its cluster's name; squeue then asks the local cluster.
    if holder.job is None or mine.cluster not in (None, holder.cluster):
        return None
    # Slurm runs a job once at a time, so this process is of a later start of it. Steps of one start run side by side.
    if holder.job == mine.job:
        return True if holder.restart != mine.restart else None
    states = job_states(holder.job)
    if states is not None and states <= ENDED:
        return True
    # A suspended process renews no lease. In a job that goes on, it may have ended.
    return False if states is not None and "SUSPENDED" in states else None


def this_process(environment: Mapping[str, str]) -> Holder:
    """Return this process as a holder whose lock starts now."""
    return Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        started=psutil.Process().create_time(),
        user=_user(),
        job=environment.get("SLURM_JOB_ID"),
        cluster=environment.get("SLURM_CLUSTER_NAME"),
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
        place=_place(),
        restart=environment.get("SLURM_RESTART_COUNT", ""),
    )


def _lives(holder: Holder) -> bool:
    try:
        return abs(psutil.Process(holder.pid).create_time() - holder.started) < 1
    except psutil.Error:
        return False


def _place() -> str:
    """Return the boot id and the pid namespace of this process. Processes that share both can compare pids.

    Host names are not enough: a container gets a new one at each start, and containers on two machines may share one.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may have no name for the user id.
        return str(os.getuid())
