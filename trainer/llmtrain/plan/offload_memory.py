"""The memory and the files that a rank's offloaded optimizer states take. No torch in here."""

from dataclasses import dataclass

from llmtrain.plan.facts import Device
from llmtrain.plan.offload import largest, slots
from llmtrain.plan.plan import Plan
from llmtrain.plan.rank_buckets import rank_buckets

# A buffer that begins at a page is cut out of one that is a page larger.
PAGE = 4096


@dataclass(frozen=True)
class OffloadMemory:
    """host: bytes of states in the host's memory. buffers: bytes of the host's buffers: those through which states in
    files pass and, on a GPU, those of gradients and weights. files: bytes of states in files."""

    host: int = 0
    buffers: int = 0
    files: int = 0


def offload_memory(plan: Plan, rank: int, device: Device) -> OffloadMemory:
    """Return what the offloaded states of a rank of the run take. device: what it computes on."""
    buckets = rank_buckets(plan, rank)
    if not buckets:
        return OffloadMemory()
    # Two slots for the gradients and the weights of a bucket.
    passing = 0 if device == "cpu" else 2 * largest(buckets) * (4 + plan.compute_bytes)
    if plan.sharding.offload.tier == "host":
        return OffloadMemory(host=sum(4 * one.states * (one.end - one.start) for one in buckets), buffers=passing)
    ring = slots(len(buckets)) * max(one.nbytes for one in buckets)
    staging = max(one.part for one in buckets)
    return OffloadMemory(buffers=ring + staging + 2 * PAGE + passing, files=sum(one.nbytes for one in buckets))
