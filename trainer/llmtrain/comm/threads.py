"""The threads of a rank on the host: the user's number, or an even share of the cores. No torch in here."""

import os
import socket
from collections.abc import Callable, Mapping
from hashlib import sha256

import psutil

from llmtrain.cluster.control_groups import cpu_quota

THREADS = "OMP_NUM_THREADS"

_BY_AGENT = "TORCHELASTIC_RUN_ID"


def started_by_agent(environment: Mapping[str, str]) -> bool:
    """Return whether torch's elastic agent has started this rank, for torchrun or for our own launcher."""
    return _BY_AGENT in environment


def set_by_user() -> bool:
    """Return whether the user has set the number of threads.

    Launchers set it for several ranks of a machine if the user has not: torchrun to 1. So it is the user's if it was
    there before the ranks were started, or if a script between launcher and rank has changed it. A process whose
    environment cannot be read counts as the user's.
    """
    given = os.environ.get(THREADS)
    if given is None:
        return False
    try:
        process: psutil.Process | None = psutil.Process()
        while process is not None:
            environment = process.environ()
            if not started_by_agent(environment):
                return THREADS in environment
            if environment.get(THREADS) != given:
                return True
            process = process.parent()
    except psutil.Error:
        pass
    return True


def even_cores(gather_all: Callable[[list[int]], list[list[int]]]) -> int:
    """Return how many cores this rank has for itself where ranks that may use the same cores, or have one quota of
    processor time, share them evenly, at least 1. gather_all: as `Ranks` has it. Collective."""
    cores, quota, host = os.sched_getaffinity(0), cpu_quota(), socket.gethostname()
    digests = (sha256(f"{host} {shared}".encode()).digest() for shared in (sorted(cores), quota.group))
    # 56 bits, which an int64 holds.
    own = [int.from_bytes(digest[:7], "big") for digest in digests]
    gathered = gather_all(own)
    by_cores, by_quota = (sum(each[index] == own[index] for each in gathered) for index in range(2))
    return max(1, int(min(len(cores) / by_cores, quota.cores / by_quota)))
