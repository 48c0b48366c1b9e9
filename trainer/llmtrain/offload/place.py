"""From a plan to the tier of this rank's offloaded states, and to the units whose states rest there."""

from collections.abc import Sequence

import torch

from llmtrain.offload.shard import OffloadedShard, TierBuckets
from llmtrain.offload.staging import Staging
from llmtrain.offload.tiers import FileTier, HostTier, StateTier
from llmtrain.plan.offload import Bucket, Offload
from llmtrain.sharding.optimizer_shard import OptimizerShard, StepRule
from llmtrain.sharding.unit import ShardedUnit


def open_tier(offload: Offload, buckets: Sequence[Bucket], device: torch.device) -> StateTier | None:
    """Return the tier of a rank's buckets; None if it offloads nothing. Raises RunFailedError."""
    if not buckets:
        return None
    if offload.tier == "host":
        return HostTier(buckets, pinned=device.type != "cpu")
    return FileTier(buckets, offload.paths, offload.weights)


def offload_states(
    unit: ShardedUnit, offload: Offload, buckets: Sequence[Bucket], tier: StateTier, staging: Staging
) -> None:
    """Move a part of a new unit's optimizer states to a tier. buckets: of all units, as the tier has them. staging:
    shared by all units."""
    own = [bucket for bucket in buckets if bucket.unit == unit.spec.name]
    if not own:
        return
    outside, before = TierBuckets(tier, staging, buckets.index(own[0]), own), unit.optimizer
    (start, end), cut = before.held, before.held[0] + own[0].start
    together = unit.masters_are_weights
    masters = before.read("master", start, end)
    stays = masters[: cut - start]
    resident = OptimizerShard(
        unit.spec, (start, cut), stays if together else stays.clone(), unit.hops.placement.backend
    )
    rule = StepRule(unit.spec, end, offload.backend)
    unit.optimizer = OffloadedShard(resident, outside, rule, masters if together else None)
    if not together:
        unit.optimizer.write("master", cut, masters[cut - start :])
