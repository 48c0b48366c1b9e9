"""Ports for programs that are started after the port was chosen."""

import os
import socket
from collections.abc import Iterator
from itertools import islice

from llmtrain.comm.environment import FIRST_PORT, PORTS

# Left to the jobs of a Slurm on this machine, which meet by their numbers.
_JOBS = 1000
# Apart enough that programs started one after another do not try the same ones.
_STRIDE = 61


def free_ports(count: int) -> list[int]:
    """Return so many ports that nobody has, below those that the system hands out to whoever asks for any (from 32768):
    one of those might be given away before it is used. Raises OSError where there are not as many."""
    found = list(islice(_free(), count))
    if len(found) < count:
        raise OSError(
            f"there are {len(found)} free ports from {FIRST_PORT + _JOBS} to {FIRST_PORT + PORTS}, not {count}"
        )
    return found


def _free() -> Iterator[int]:
    room = PORTS - _JOBS
    for place in range(room):
        port = FIRST_PORT + _JOBS + (os.getpid() * _STRIDE + place) % room
        if _is_free(port):
            yield port


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True
