"""The memory of a described accelerator, and of this machine. No torch in here."""

from dataclasses import dataclass

from llmtrain_data import units

from llmtrain.cluster.control_groups import group_limit
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


def stated_host_memory(cluster: Cluster | None, world: int) -> StatedMemory | None:
    """Return a rank's even share of a description's `node.host.memory`; None if it is not stated. world: ranks of the
    run, which may leave a part of a node without ranks."""
    if cluster is None or cluster.node.host is None or (text := cluster.node.host.memory) is None:
        return None
    ranks = min(cluster.node.ranks, world)
    return StatedMemory(int(quantity(text, "byte")) // ranks, f"{text} for {units.count(ranks, 'rank')}")


def machine_memory(*, swap: bool = False) -> int:
    """Return the bytes of memory of this machine, or of its container's limit if that is smaller. swap: add the swap
    space."""
    import psutil  # importing psutil takes 0.01 s, and most commands do not need it

    memory = min(psutil.virtual_memory().total, group_limit())
    return memory + psutil.swap_memory().total if swap else memory


def usable_memory(memory: int) -> int:
    """Return the bytes that ranks on GPUs may take of a machine's memory, 7 of 8. memory: bytes of the machine.

    The rest is for what no plan counts: buffers of networks, page tables, the page cache of data and of checkpoints,
    and other programs. What ranks pin for their GPUs can be neither swapped nor reclaimed.
    """
    return memory * 7 // 8
