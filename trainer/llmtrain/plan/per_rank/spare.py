"""Which buckets of a rank may be stepped before the norm of the gradients is known. No torch in here."""

from collections.abc import Sequence
from dataclasses import replace

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.levels import shard_range
from llmtrain.model.tensors import UnitSpec
from llmtrain.plan.offload import Bucket
from llmtrain.plan.per_rank.rank_units import rank_units
from llmtrain.plan.per_rank.tied_embedding import tied_pair
from llmtrain.plan.plan import Plan


def with_spare(plan: Plan, rank: int, buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return a rank's buckets, of which `offload.spare` of the elements may be stepped ahead.

    They are spread evenly: in the next forward pass, the others are then needed at the rate at which they are stepped.
    """
    share, units = plan.sharding.offload.spare, {unit.name: unit for unit in rank_units(plan, rank)}
    if not share:
        return list(buckets)
    left, found = 0.0, []
    for bucket in reversed(buckets):
        size = bucket.end - bucket.start
        left += share * size
        # Sums of shares are rounded.
        chosen = size <= left + 1e-6 and _complete_early(plan, rank, units[bucket.unit], bucket)
        left -= size if chosen else 0
        found.append(replace(bucket, spare=chosen))
    return found[::-1]


def _complete_early(plan: Plan, rank: int, unit: UnitSpec, bucket: Bucket) -> bool:
    """Whether the gradients of a bucket are complete before the last pass ends: nothing sums them once more then."""
    placement, tensor = plan.sharding.placements[unit.name], plan.grid.degree(Axis.TENSOR)
    if placement.moves_gradients or (unit.name == "embedding" and tied_pair(plan, rank)):
        return False
    if tensor > 1 and plan.sequence_parallel and placement.degrees.ranks == 1:
        return False
    if plan.averages_replicas:
        # The gradients of TP-replicated parameters, at the unit's end, are made equal at the end of the passes.
        padded = placement.padded(unit.numel)
        data_rank = plan.grid.coordinate(rank, *placement.axes)
        start, _ = shard_range(placement.levels, data_rank, placement.degrees.optimizer, padded)
        return start + bucket.end <= unit.replicated_from
    return True
