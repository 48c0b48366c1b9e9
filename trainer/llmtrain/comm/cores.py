"""The cores that this process runs on: those of one processor (CPU socket). No torch in here.

Memory lies on the socket whose core touches it first. A rank that is bound before it allocates therefore has its states
on the same socket as its threads.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmtrain.cluster.sockets import SYS, cores_by_socket, device_socket, own_socket

# One folder for each thread of this process.
_THREADS = Path("/proc/self/task")


def bind(cores: frozenset[int], allowed: frozenset[int]) -> bool:
    """Run all threads of this process, and those that they start, on those of `cores` that are `allowed`. Return
    whether that changes anything."""
    if not cores & allowed or cores >= allowed:
        return False
    run_on(cores & allowed)
    return True


def run_on(cores: frozenset[int]) -> None:
    """Run all threads of this process, and those that they start, on `cores`."""
    for thread in _THREADS.iterdir():
        # A thread may have ended.
        with suppress(OSError):
            os.sched_setaffinity(int(thread.name), cores)


@dataclass(frozen=True)
class Bound:
    """Where a rank runs. socket: number of the processor. threads: the rank's even share of its cores."""

    socket: int
    threads: int


def bind_to_socket(local: tuple[int, int], gpus: Sequence[str], sys: Path = SYS) -> Bound | None:
    """Bind this rank to the socket of its GPU; on CPUs, to one that it shares with neighbouring ranks. Return None if
    it is not bound.

    local: the rank's number among this machine's ranks, and their number. gpus: PCI addresses of the GPUs that this
    process sees; none on CPUs. Nothing is bound on a machine with one socket, where the launcher has bound the ranks,
    where the socket of the GPU is unknown, and where fewer ranks than sockets compute on CPUs: cores would be unused.
    """
    (rank, ranks), cores, allowed = local, cores_by_socket(sys), frozenset(os.sched_getaffinity(0))
    if len(allowed) * ranks <= sum(map(len, cores.values())) and ranks > 1:
        # Each rank has cores of its own, or all of them few.
        return None
    usable = sum(1 for own in cores.values() if own & allowed)
    near = [device_socket(sys / "bus/pci/devices" / address, cores) for address in gpus]
    own = near[rank if len(near) > 1 else 0] if near else None
    if usable < 2 or (own is None if near else ranks < usable):
        return None
    mine = own_socket(cores, allowed, local, own)
    if mine is None or not bind(cores[mine], allowed):
        return None
    # A rank that sees its own GPU alone does not know where the others are.
    sharing = near[:ranks].count(mine) if len(near) >= ranks else -(-ranks // usable)
    return Bound(mine, max(1, len(cores[mine] & allowed) // sharing))
