"""`llmtrain bench memory`: measure a machine's memory and volumes, and write a cluster description with the figures."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain_data import units
from llmtrain_data.output import Terminal, say, say_json

from llmtrain.cluster.control_groups import usable_cores
from llmtrain.cluster.description import Cluster, Host, Node
from llmtrain.cluster.load import load_cluster
from llmtrain.cluster.memory import machine_memory, usable_memory
from llmtrain.cluster.sockets import Cores, cores_by_socket, volume_socket
from llmtrain.comm.cores import run_on
from llmtrain.errors import BadInputError
from llmtrain.launch.measure.memory_result import MemoryFound, VolumeRate, described, plain, tables
from llmtrain.launch.measure.result import check_writable, write_cluster
from llmtrain.plan.resolve.offload_check import SpaceNeeded, volume_problem

if TYPE_CHECKING:
    from llmtrain.launch.measure.volume_rates import SocketBinding


@dataclass(frozen=True)
class MemoryBench:
    """The command's options. cluster: file or name of the description to start from. paths: a folder on each volume.
    seconds: time for all measurements of volumes. output: file to write."""

    cluster: str | None = None
    paths: tuple[str, ...] = ()
    seconds: float = 15.0
    output: Path | None = None
    as_json: bool = False


def bench_memory(options: MemoryBench) -> None:
    """Measure the memory and the volumes of this machine. Raises BadInputError, and RunFailedError if a volume
    fails."""
    check_writable(options.output)
    cluster = _start_from(options)
    paths = options.paths or (tuple(one.path for one in cluster.node.nvme) if cluster else ())
    from llmtrain.launch.measure.volume_rates import FILE

    space = SpaceNeeded("a file for the measurement", "give another folder, or free some space")
    other = "give a folder of an NVMe volume"
    if problem := volume_problem("--paths" if options.paths else "node.nvme", paths, [FILE] * len(paths), space, other):
        raise BadInputError(problem)
    found = _measured(paths, options.seconds)
    after = described(cluster or _this_machine(), found)
    if options.output is not None:
        write_cluster(options.output, after, f"llmtrain bench memory: {date.today()}")
    if options.as_json:
        say_json(plain(found, after))
        return
    console = Terminal()
    for table in tables(found):
        console.print(table, "")
    if not paths:
        console.print("no volume was measured; name a folder on each with --paths, or in the description's node.nvme")
    if options.output is not None:
        console.print(f"use it in a recipe with cluster={options.output}")


def _start_from(options: MemoryBench) -> Cluster | None:
    """Return the given description, or that of the file to write, if it is there."""
    if options.cluster is not None:
        return load_cluster(options.cluster)
    return load_cluster(options.output) if options.output is not None and options.output.is_file() else None


def _this_machine() -> Cluster:
    from llmtrain.comm.device import gpu_count
    from llmtrain.launch.bench_comm import this_accelerator

    sockets = max(1, len(cores_by_socket()))
    host = Host(memory=units.size(usable_memory(machine_memory())), cores=usable_cores(), sockets=sockets)
    return Cluster(accelerator=this_accelerator(), node=Node(ranks=max(1, gpu_count()), host=host))


def _measured(paths: Sequence[str], seconds: float) -> MemoryFound:
    from llmtrain.launch.measure.memory_rates import adamw_steps, device_copies, host_copies
    from llmtrain.launch.measure.volume_rates import measure_volumes

    usable, cores = frozenset(os.sched_getaffinity(0)), cores_by_socket()
    say("measuring copies and AdamW", err=True)
    copies = [*host_copies(usable_cores()), *device_copies()]
    stepped = list(adamw_steps(usable_cores()))
    volumes: list[VolumeRate] = []
    if paths:
        say(f"measuring {units.count(len(paths), 'volume')} for {units.duration(seconds)}", err=True)
        volumes += measure_volumes(paths, seconds, lambda path: list(_sockets(path, cores, usable)))
    sockets = {path: volume_socket(path, cores) for path in paths}
    return MemoryFound(copies, stepped, volumes, sockets)


def _sockets(path: str, cores: Cores, usable: frozenset[int]) -> Iterator["SocketBinding"]:
    """Yield the sockets from which a volume is measured; none where there is one, or where its own is not known."""
    own = volume_socket(path, cores)
    others = [number for number, socket_cores in cores.items() if number != own and socket_cores & usable]
    if own is None or not cores[own] & usable or not others:
        return
    yield "near", _bound(cores[own] & usable, usable)
    yield "far", _bound(cores[others[0]] & usable, usable)


@contextmanager
def _bound(cores: frozenset[int], usable: frozenset[int]) -> Iterator[None]:
    """Run this process on some cores, and on all usable ones afterwards."""
    run_on(cores)
    try:
        yield
    finally:
        run_on(usable)
