"""The memory and the files that a rank's model states take elsewhere than on its device. No torch in here."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from llmtrain.plan.facts import Device
from llmtrain.plan.gradient_buckets import gradient_buckets
from llmtrain.plan.offload import Bucket, largest, slots
from llmtrain.plan.outside_weights import outside_shards
from llmtrain.plan.placement import PAGE
from llmtrain.plan.plan import Plan
from llmtrain.plan.rank_buckets import rank_buckets


@dataclass(frozen=True)
class OffloadMemory:
    """host: bytes of optimizer states in the host's memory. weights, gradients: bytes of weights and of
    sums of gradients there. buffers: bytes of the
    host's buffers: those through which states in files pass and, on a GPU, those of gradients and weights. files: bytes
    of all of these in files."""

    host: int = 0
    weights: int = 0
    gradients: int = 0
    buffers: int = 0
    files: int = 0

    def __add__(self, other: "OffloadMemory") -> "OffloadMemory":
        """Return the sum of each."""
        return OffloadMemory(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})


def offload_memory(plan: Plan, rank: int, device: Device) -> OffloadMemory:
    """Return what a rank of the run holds elsewhere than on its device. device: what it computes on."""
    return _states(plan, rank, device) + _weights(plan, rank, device) + _gradients(plan, rank, device)


def _states(plan: Plan, rank: int, device: Device) -> OffloadMemory:
    buckets = rank_buckets(plan, rank)
    if not buckets:
        return OffloadMemory()
    # Two slots for the gradients and the weights of a bucket.
    passing = 0 if device == "cpu" else 2 * largest(buckets) * (4 + plan.compute_bytes)
    if plan.sharding.offload.tier == "host":
        return OffloadMemory(host=sum(4 * one.states * (one.end - one.start) for one in buckets), buffers=passing)
    return OffloadMemory(buffers=_ring(buckets) + passing, files=sum(one.nbytes for one in buckets))


def _ring(buckets: Sequence[Bucket]) -> int:
    """Return the bytes of the slots through which buckets in files pass, and of the buffer for a part of one."""
    ring = slots(len(buckets)) * max(one.nbytes for one in buckets)
    # A buffer that begins at a page is cut out of one that is a page larger.
    return ring + max(one.part for one in buckets) + 2 * PAGE


def _weights(plan: Plan, rank: int, device: Device) -> OffloadMemory:
    shards = [numel * plan.compute_bytes for numel in outside_shards(plan, rank).values()]
    if not shards:
        return OffloadMemory()
    if plan.sharding.offload.parameters == "host":
        return OffloadMemory(weights=sum(shards))
    # A GPU's weights pass through a buffer for each direction.
    return OffloadMemory(buffers=0 if device == "cpu" else 2 * max(shards), files=sum(shards))


def _gradients(plan: Plan, rank: int, device: Device) -> OffloadMemory:
    buckets = [bucket for unit in gradient_buckets(plan, rank).values() for bucket in unit.buckets]
    if not buckets:
        return OffloadMemory()
    # The gradients of a bucket of one backward pass, on their way from a GPU.
    passing = 0 if device == "cpu" else 4 * largest(buckets)
    if plan.sharding.offload.gradients == "host":
        return OffloadMemory(gradients=sum(4 * (one.end - one.start) for one in buckets), buffers=passing)
    return OffloadMemory(buffers=_ring(buckets) + passing, files=sum(one.nbytes for one in buckets))
