"""The buckets of a rank's offloaded optimizer states. No torch in here."""

from llmtrain.cluster.layout import Axis
from llmtrain.plan.offload import Bucket
from llmtrain.plan.pipeline.stage_layout import units_of
from llmtrain.plan.plan import Plan
from llmtrain.plan.spare import with_spare


def rank_buckets(plan: Plan, rank: int) -> list[Bucket]:
    """Return the buckets of a rank of the run, in the order in which it steps them."""
    offload, grid = plan.sharding.offload, plan.grid
    found = []
    for spec in units_of(
        plan.model, plan.stages_of(rank), grid.coordinate(rank, Axis.TENSOR), grid.degree(Axis.TENSOR)
    ):
        placement = plan.sharding.placements[spec.name]
        stepped = placement.padded(spec.numel) // placement.degrees.optimizer
        states = 3 if placement.masters == "separate" else 2
        found += [Bucket(spec.name, start, end, states) for start, end in offload.buckets(stepped)]
    return with_spare(plan, rank, found)
