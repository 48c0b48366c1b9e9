"""The host memory and the files that a rank's offloaded model states take. No torch in here."""

from collections import Counter
from dataclasses import dataclass

from llmtrain.plan.offload import PARTS, Bucket, bucket_slots, largest
from llmtrain.plan.per_rank.offloaded_weights import is_direct, offloaded_shards
from llmtrain.plan.per_rank.rank_activations import in_pages
from llmtrain.plan.per_rank.rank_buckets import bucket_sizes, rank_buckets
from llmtrain.plan.placement import PAGE
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.gradient_buckets import gradient_sizes
from llmtrain.plan.summed import summed


@dataclass(frozen=True, kw_only=True)
class OffloadMemory:
    """host: bytes of optimizer states in the host's memory. spare: bytes there for what is stepped ahead: states, if
    they rest there, and weights, if they wait there. weights, gradients: bytes of weights and of sums of gradients
    there. buffers: bytes of the host's buffers: those through which states in files pass and, on a GPU, those of
    gradients and weights. slots: bytes of the device's memory through which states pass that it steps. ahead: bytes
    there of the weights of what is stepped ahead, if they wait there. files: bytes of all of these in files."""

    host: int = 0
    spare: int = 0
    weights: int = 0
    gradients: int = 0
    buffers: int = 0
    slots: int = 0
    ahead: int = 0
    files: int = 0

    def __add__(self, other: "OffloadMemory") -> "OffloadMemory":
        """Return the sum of each."""
        return summed(self, other)


def offload_memory(plan: Plan, rank: int) -> OffloadMemory:
    """Return the memory and files of a rank's offloaded model states."""
    return _states(plan, rank) + _weights(plan, rank) + _gradients(plan, rank)


def _states(plan: Plan, rank: int) -> OffloadMemory:
    sizes, offload = bucket_sizes(plan, rank), plan.sharding.offload
    if not sizes:
        return OffloadMemory()
    # Their order decides which of the buckets are spare.
    spare = [one for one in rank_buckets(plan, rank) if one.spare] if offload.spare else []
    weights, most = sum(plan.compute_bytes * one.numel for one in spare), largest(sizes)
    # Each thread that steps has a pinned buffer for the gradients of one bucket, and one for its weights.
    beside = plan.gradient_bytes + plan.compute_bytes
    passing = 0 if plan.device == "cpu" or offload.on_device else offload.workers * most * beside
    slots = _slots(plan, most, max(one.states for one in sizes)) if offload.on_device else 0
    ahead, weights = (weights, 0) if offload.spare_weights == "device" else (0, weights)
    if offload.tier == "host":
        states, more = (
            sum(4 * one.states * one.numel * count for one, count in some.items()) for some in (sizes, Counter(spare))
        )
        return OffloadMemory(host=states, spare=more + weights, buffers=passing, slots=slots, ahead=ahead)
    files = _nbytes(sizes) + sum(one.nbytes for one in spare)
    ring = _ring(sizes, offload.overlap)
    return OffloadMemory(spare=weights, buffers=ring + passing, slots=slots, ahead=ahead, files=files)


def _slots(plan: Plan, most: int, states: int) -> int:
    """Return the bytes of the device's memory for buckets that it steps. A step ahead takes a copy of the gradient, and
    memory for a weight that waits on the host. most: elements of the largest bucket."""
    offload = plan.sharding.offload
    waiting = plan.compute_bytes if offload.spare_weights == "host" else 0
    ahead = plan.gradient_bytes + waiting if offload.spare else 0
    return offload.workers * most * (4 * states + ahead)


def _ring(sizes: Counter[Bucket], overlap: int) -> int:
    """Return the bytes of the slots through which buckets in files pass, and of the buffers for parts of them."""
    ring = bucket_slots(sizes.total(), overlap) * max(one.nbytes for one in sizes)
    # A buffer that begins at a page is a view into one that is a page larger.
    return ring + PARTS * max(one.part for one in sizes) + 2 * PAGE


def _nbytes(sizes: Counter[Bucket]) -> int:
    return sum(one.nbytes * count for one, count in sizes.items())


def _weights(plan: Plan, rank: int) -> OffloadMemory:
    shards = [numel * plan.compute_bytes for numel in offloaded_shards(plan, rank).values()]
    if not shards:
        return OffloadMemory()
    if plan.sharding.offload.parameters == "host":
        return OffloadMemory(weights=sum(shards))
    regions = [in_pages(nbytes) for nbytes in shards]
    # Others pass through a buffer for each direction, which begins at a page of one that is a page larger.
    direct = plan.device == "cpu" and is_direct(plan, rank)
    return OffloadMemory(buffers=0 if direct else 2 * (max(regions) + PAGE), files=sum(regions))


def _gradients(plan: Plan, rank: int) -> OffloadMemory:
    sizes = gradient_sizes(plan, rank)
    if not sizes:
        return OffloadMemory()
    # The gradients of a bucket of one backward pass, on their way from a GPU.
    passing = 0 if plan.device == "cpu" else 4 * largest(sizes)
    if plan.sharding.offload.gradients == "host":
        return OffloadMemory(gradients=sum(4 * one.numel * count for one, count in sizes.items()), buffers=passing)
    # A buffer that begins at a page is a view into one that is a page larger.
    ring = bucket_slots(sizes.total()) * max(one.nbytes for one in sizes) + PAGE
    return OffloadMemory(buffers=ring + passing, files=_nbytes(sizes))
