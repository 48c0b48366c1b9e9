"""The buckets of a rank's offloaded optimizer states. No torch in here."""

from collections import Counter

from llmtrain.plan.offload import Bucket
from llmtrain.plan.per_rank.rank_units import rank_units
from llmtrain.plan.per_rank.roles import roles
from llmtrain.plan.per_rank.spare import with_spare
from llmtrain.plan.plan import Plan


def rank_buckets(plan: Plan, rank: int) -> list[Bucket]:
    """Return the buckets of a rank of the run, in the order in which it steps them."""
    offload, found = plan.sharding.offload, list[Bucket]()
    if not offload.share:
        return found
    for spec in rank_units(plan, rank):
        placement = plan.sharding.placements[spec.name]
        stepped = placement.padded(spec.numel) // placement.degrees.optimizer
        states = 3 if placement.masters == "separate" else 2
        resident = offload.resident(spec.name, stepped)
        found += [Bucket(spec.name, start, end, states) for start, end in offload.buckets(resident, stepped)]
    return with_spare(plan, rank, found)


def steps_ahead(plan: Plan) -> bool:
    """Return whether any rank may step a bucket before the norm of the gradients is known."""
    return any(bucket.spare for role in roles(plan) for bucket in rank_buckets(plan, role.rank))


def bucket_sizes(plan: Plan, rank: int) -> Counter[Bucket]:
    """Return how many buckets of a rank of the run have a size: each stands for all like it, whatever its unit."""
    offload, found, units = plan.sharding.offload, Counter[Bucket](), Counter[tuple[int, int, int]]()
    for spec in rank_units(plan, rank):
        placement = plan.sharding.placements[spec.name]
        stepped = placement.padded(spec.numel) // placement.degrees.optimizer
        states = 3 if placement.masters == "separate" else 2
        units[offload.resident(spec.name, stepped), stepped, states] += 1
    for (resident, stepped, states), count in units.items():
        for start, end in offload.buckets(resident, stepped):
            found[Bucket("", 0, end - start, states)] += count
    return found
