"""Free ports for programs that start later."""

import os
import socket
from collections.abc import Iterator
from itertools import islice

from llmtrain.comm.environment import FIRST_PORT, PORTS

# The first ports are for the jobs of a Slurm on this machine, which derive theirs from the job number.
_JOBS = 1000
# Programs that start in sequence begin this many ports apart.
_STRIDE = 61


def free_ports(count: int) -> list[int]:
    """Return `count` free ports below the system's ephemeral ports (from 32768): another program could get one of those
    before it is used. Raises OSError if there are fewer free ports."""
    found = list(islice(_free(), count))
    if len(found) < count:
        raise OSError(
            f"only {len(found)} ports from {FIRST_PORT + _JOBS} to {FIRST_PORT + PORTS} are free; expected {count}"
        )
    return found


def _free() -> Iterator[int]:
    size = PORTS - _JOBS
    for place in range(size):
        port = FIRST_PORT + _JOBS + (os.getpid() * _STRIDE + place) % size
        if _is_free(port):
            yield port


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True
