"""The memory and the files that a rank's model states take elsewhere than on its device. No torch in here."""

from dataclasses import dataclass, fields

from llmtrain.plan.facts import Device
from llmtrain.plan.offload import largest, slots
from llmtrain.plan.outside_weights import outside_shards
from llmtrain.plan.placement import PAGE
from llmtrain.plan.plan import Plan
from llmtrain.plan.rank_buckets import rank_buckets


@dataclass(frozen=True)
class OffloadMemory:
    """host: bytes of optimizer states in the host's memory. weights: bytes of weights there. buffers: bytes of the
    host's buffers: those through which states in files pass and, on a GPU, those of gradients and weights. files: bytes
    of states and weights in files."""

    host: int = 0
    weights: int = 0
    buffers: int = 0
    files: int = 0

    def __add__(self, other: "OffloadMemory") -> "OffloadMemory":
        """Return the sum of each."""
        return OffloadMemory(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})


def offload_memory(plan: Plan, rank: int, device: Device) -> OffloadMemory:
    """Return what a rank of the run holds elsewhere than on its device. device: what it computes on."""
    return _states(plan, rank, device) + _weights(plan, rank, device)


def _states(plan: Plan, rank: int, device: Device) -> OffloadMemory:
    buckets = rank_buckets(plan, rank)
    if not buckets:
        return OffloadMemory()
    # Two slots for the gradients and the weights of a bucket.
    passing = 0 if device == "cpu" else 2 * largest(buckets) * (4 + plan.compute_bytes)
    if plan.sharding.offload.tier == "host":
        return OffloadMemory(host=sum(4 * one.states * (one.end - one.start) for one in buckets), buffers=passing)
    ring = slots(len(buckets)) * max(one.nbytes for one in buckets)
    staging = max(one.part for one in buckets)
    # A buffer that begins at a page is cut out of one that is a page larger.
    return OffloadMemory(buffers=ring + staging + 2 * PAGE + passing, files=sum(one.nbytes for one in buckets))


def _weights(plan: Plan, rank: int, device: Device) -> OffloadMemory:
    shards = [numel * plan.compute_bytes for numel in outside_shards(plan, rank).values()]
    if not shards:
        return OffloadMemory()
    if plan.sharding.offload.parameters == "host":
        return OffloadMemory(weights=sum(shards))
    # A GPU's weights pass through a buffer for each direction.
    return OffloadMemory(buffers=0 if device == "cpu" else 2 * max(shards), files=sum(shards))
