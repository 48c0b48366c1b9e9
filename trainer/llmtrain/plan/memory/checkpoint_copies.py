"""The host memory of a checkpoint: copies of states that are made before it is written in the background, and buffers
for reading offloaded states, or those of a GPU without `checkpoint.async`. No torch in here."""

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.levels import shard_range
from llmtrain.plan.offload import PARTS
from llmtrain.plan.per_rank.roles import Role
from llmtrain.plan.per_rank.tied_embedding import holds_second_copy
from llmtrain.plan.placement import PAGE
from llmtrain.plan.plan import Plan

STATE_BYTES = 12
"""Masters and two moments of an element, fp32."""

SHARD_FILE_BLOCK = 16 * 1024**2
"""Bytes of a range that a checkpoint reads and writes at the same time."""


def copy_bytes(plan: Plan, role: Role) -> int:
    """Return the most bytes that a rank of a role copies before a checkpoint is written in the background; 0 if it is
    written from the states themselves.

    Ranks that hold the same optimizer shard copy an even share each. The first tensor-parallel rank alone copies
    TP-replicated parameters, and the first stage a tied embedding.
    """
    # A checkpoint reads the states of units that are offloaded, in part or whole, while it is written.
    if plan.sharding.offload.share or not plan.checkpoint.asynchronous:
        return 0
    first = plan.grid.coordinate(role.rank, Axis.TENSOR) == 0
    second = holds_second_copy(plan, role.rank)
    elements = 0
    for unit in role.units:
        if second and unit.name == "embedding":
            continue
        placement = plan.sharding.placements[unit.name]
        degrees, padded = placement.degrees, placement.padded(unit.numel)
        _, end = shard_range(placement.levels, 0, degrees.optimizer, padded)
        copied = min(end, unit.numel if first else unit.replicated_from)
        elements += -(-copied // (degrees.ranks // degrees.optimizer))
    return STATE_BYTES * elements


def buffer_bytes(plan: Plan, role: Role) -> int:
    """Return the most bytes of the host's buffers through which a rank's checkpoint reads states while it is written; 0
    if it reads copies, or the states where they are. A block is put together from parts of buckets. Those in files
    are read in whole pages, several at the same time."""
    offload = plan.sharding.offload
    if not offload.share and (plan.device == "cpu" or plan.checkpoint.asynchronous):
        return 0
    block = min(SHARD_FILE_BLOCK, 4 * max(tensor.numel for unit in role.units for tensor in unit.tensors))
    parts = min(block, PARTS * 4 * offload.bucket) + PARTS * 3 * PAGE if offload.share and offload.tier == "nvme" else 0
    return block + parts
