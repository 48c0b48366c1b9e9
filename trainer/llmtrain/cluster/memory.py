"""The memory of a described accelerator, and of this machine. No torch in here."""

import sys
from dataclasses import dataclass
from pathlib import Path

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.quantity import quantity


@dataclass(frozen=True)
class StatedMemory:
    """Memory of one rank that a description states. size: its bytes. text: as the description has it."""

    size: int
    text: str


def stated_memory(cluster: Cluster | None) -> StatedMemory | None:
    """Return a description's `accelerator.memory`; None if it is not stated."""
    if cluster is None or cluster.accelerator is None or (text := cluster.accelerator.memory) is None:
        return None
    return StatedMemory(int(quantity(text, "byte")), text)


def stated_host_memory(cluster: Cluster | None) -> StatedMemory | None:
    """Return a rank's even share of a description's `node.host.memory`; None if it is not stated."""
    if cluster is None or cluster.node.host is None or (text := cluster.node.host.memory) is None:
        return None
    ranks = cluster.node.ranks
    return StatedMemory(int(quantity(text, "byte")) // ranks, f"{text} for {ranks} ranks")


def machine_memory(*, swap: bool = False) -> int:
    """Return the bytes of memory of this machine, or of its container's limit if that is smaller. swap: add the swap
    space."""
    import psutil  # importing psutil takes 0.01 s, and most commands do not need it

    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    memory = min(psutil.virtual_memory().total, int(limit) if limit.isdigit() else sys.maxsize)
    return memory + psutil.swap_memory().total if swap else memory
