"""Weight shards that rest elsewhere than on the device of a rank. No torch in here."""

from llmtrain.cluster.layout import Axis
from llmtrain.plan.pipeline.stage_layout import units_of
from llmtrain.plan.placement import PAGE
from llmtrain.plan.plan import Plan


def is_direct(plan: Plan, rank: int) -> bool:
    """Return whether a CPU reads and writes shards in files without a copy: all of them are whole pages."""
    return all(numel * plan.compute_bytes % PAGE == 0 for numel in outside_shards(plan, rank).values())


def outside_shards(plan: Plan, rank: int) -> dict[str, int]:
    """Return the elements of each such shard of a rank of the run, by unit."""
    grid = plan.grid
    specs = units_of(plan.model, plan.stages_of(rank), grid.coordinate(rank, Axis.TENSOR), grid.degree(Axis.TENSOR))
    placed = ((spec, plan.sharding.placements[spec.name]) for spec in specs)
    return {
        spec.name: placement.padded(spec.numel) // placement.degrees.weights
        for spec, placement in placed
        if placement.moves_weights
    }
