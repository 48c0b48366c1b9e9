"""What offloaded states need of this machine: room for their files, and kernels. No torch in here."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llmtrain_data import units

from llmtrain.cluster.tiers import node_ranks
from llmtrain.model.tensors import parameter_count
from llmtrain.plan.direct_file import probe
from llmtrain.plan.memory.offload_memory import offload_memory
from llmtrain.plan.per_rank.rank_activations import activation_memory
from llmtrain.plan.per_rank.roles import roles
from llmtrain.plan.plan import Plan

# File systems that keep their files in memory.
IN_MEMORY = ("tmpfs", "ramfs")


class SpaceNeeded(NamedTuple):
    """What needs the bytes of files, and what to do where a volume has too few."""

    user: str
    advice: str


def offload_problem(plan: Plan, ranks_per_node: int) -> str | None:
    """Return an error if a folder of `offload.paths` cannot hold the files of this machine's ranks, else None."""
    paths, ranks = _paths(plan), min(ranks_per_node, plan.grid.world)
    if not paths:
        return None
    needed = _bytes_by_volume(plan, ranks)
    advice = "give a larger volume or more of them, or offload less"
    space = SpaceNeeded(f"the offload of {units.count(ranks, 'rank')}", advice)
    # The folders may be those of the cluster file.
    return volume_problem("offload.paths", paths, needed, space, "set offload.paths to folders of NVMe volumes")


def offload_remarks(plan: Plan) -> list[str]:
    """Return sentences about what is offloaded to no other memory than it is in, about each folder of `offload.paths`
    whose file system cannot reserve the space of files, and about one that leaves no room for checkpoints."""
    return [*_in_the_same_memory(plan), *_no_room_for_checkpoints(plan)] + [
        f"offload.paths has {path}, whose file system cannot reserve space (fallocate): the run ends if others fill it"
        for path in _paths(plan)
        if _cannot_reserve(path)
    ]


def offload_kernels(plan: Plan) -> tuple[str, ...]:
    """Return the C++ kernels for which a plan's offload has no substitute. Where CPUs compute everything, torch's
    operations take the place of those that step and sum; on the host of a GPU, steps would take a hundred times as
    long."""
    offload, on_gpu = plan.sharding.offload, plan.device != "cpu"
    needed = {
        "direct_io": bool(_paths(plan)),
        "adamw": on_gpu and offload.share > 0 and not offload.on_device,
        "squared_sum": on_gpu and offload.gradients != "device",
    }
    return tuple(kernel for kernel, is_needed in needed.items() if is_needed)


def volume_problem(key: str, paths: Sequence[str], needed: Sequence[int], space: SpaceNeeded, other: str) -> str | None:
    """Return an error if one of some folders is not on a volume of its own with room for its bytes, else None.

    key: what names the folders. needed: bytes of each. space: what needs them. other: what to do about a folder that
    cannot be used.
    """
    problems = [
        problem
        for path, nbytes in zip(paths, needed, strict=True)
        for problem in _problems(key, Path(path), nbytes, space, other)
    ]
    return next(iter([*problems, *_shared(key, paths)]), None)


def _files(plan: Plan, rank: int) -> int:
    return offload_memory(plan, rank).files + activation_memory(plan, rank).files


def _problems(key: str, path: Path, needed: int, space: SpaceNeeded, other: str) -> Iterator[str]:
    said = f"{key} has {path}"
    if not path.is_dir():
        yield f"{said}, which is no folder on this machine; {other}"
    elif not os.access(path, os.W_OK | os.X_OK):
        yield f"{said}, which may not be written to; {other}"
    elif (kind := _file_system(path)) in IN_MEMORY:
        yield f"{said}, which is on a {kind}, in memory; {other}"
    elif (free := shutil.disk_usage(path).free) < needed:
        yield f"{said}, where {units.size(free)} are free, and {space.user} takes {units.size(needed)}; {space.advice}"
    else:
        try:
            probe(str(path))
        except OSError as error:
            yield f"{said}, where a file has no direct reads and writes (O_DIRECT): {error.strerror}; {other}"


def _shared(key: str, paths: Sequence[str]) -> Iterator[str]:
    volumes: dict[int, str] = {}
    for path in paths:
        with suppress(OSError):
            volume = os.stat(path).st_dev
            if volume in volumes:
                yield f"{key} has {volumes[volume]} and {path}, which are on one volume; leave one of them out"
            volumes[volume] = path


def _file_system(path: Path) -> str | None:
    """Return the kind of the file system that a folder is on; None if the system does not say."""
    device = os.stat(path).st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            if before.split()[2] == numbers:
                return after.split()[0]
    return None


def _in_the_same_memory(plan: Plan) -> list[str]:
    offload = plan.sharding.offload
    tiers = {
        "optimizer": offload.tier,
        "parameters": offload.parameters,
        "gradients": offload.gradients,
        "activations": plan.activation_offload.tier,
    }
    keys = [f"offload.{key}" for key, tier in tiers.items() if tier == "host"]
    if plan.device != "cpu" or not keys:
        return []
    return [f"offload to host saves no memory on CPUs, which compute in the host's memory ({', '.join(keys)})"]


def _bytes_by_volume(plan: Plan, ranks: int) -> list[int]:
    """Return the bytes of files in each of `_paths`. ranks: number of ranks of this machine."""
    rests = plan.sharding.offload if plan.sharding.offload.paths else plan.activation_offload
    files = ranks * max(_files(plan, role.rank) for role in roles(plan))
    # Volumes take bytes in proportion to their bandwidths.
    return [int(files * one / sum(rests.bandwidths)) for one in rests.bandwidths]


def _no_room_for_checkpoints(plan: Plan) -> Iterator[str]:
    """Yield a sentence if the checkpoints of a run that has none yet are to be on the volume of offloaded states, which
    has no room for them."""
    folder, paths = Path(plan.logging.dir, plan.name).absolute(), _paths(plan)
    if not paths or folder.exists():
        return
    above = next(parent for parent in folder.parents if parent.is_dir())
    ranks, number = min(node_ranks(plan.tiers), plan.grid.world), plan.checkpoint.keep + 1
    # fp32 masters and two moments. The oldest one stays until the newest is complete.
    size = number * 12 * parameter_count(plan.model)
    with suppress(OSError):
        for path, nbytes in zip(paths, _bytes_by_volume(plan, ranks), strict=True):
            free = shutil.disk_usage(path).free - nbytes
            if os.stat(path).st_dev == os.stat(above).st_dev and free < size:
                yield (
                    f"offload.paths has {path}, on the volume of {folder}: beside what is offloaded, "
                    f"{units.size(max(free, 0))} are free there, and {number} checkpoints take {units.size(size)}; set "
                    "logging.dir to another volume, or a smaller checkpoint.keep"
                )


def _paths(plan: Plan) -> Sequence[str]:
    """Return the folders of all files of a plan."""
    return plan.sharding.offload.paths or plan.activation_offload.paths


def _cannot_reserve(path: str) -> bool:
    """Return whether files in a folder take their space as they are written. If none can be made, that is an error of
    its own."""
    with suppress(OSError):
        return not probe(path)
    return False
