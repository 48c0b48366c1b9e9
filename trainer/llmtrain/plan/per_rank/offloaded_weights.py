"""Offloaded weight shards of a rank. No torch in here."""

from llmtrain.model.tensors import UnitSpec
from llmtrain.plan.per_rank.rank_units import rank_units
from llmtrain.plan.placement import PAGE
from llmtrain.plan.plan import Plan


def is_direct(plan: Plan, rank: int) -> bool:
    """Return whether a CPU reads and writes shards in files without a copy: all of them are whole pages."""
    return all(numel * plan.compute_bytes % PAGE == 0 for numel in offloaded_shards(plan, rank).values())


def offloaded_shards(plan: Plan, rank: int) -> dict[str, int]:
    """Return the elements of each such shard of a rank of the run, by unit."""
    placed = ((spec, plan.sharding.placements[spec.name]) for spec in rank_units(plan, rank))
    return {
        spec.name: placement.padded(spec.numel) // placement.degrees.weights
        for spec, placement in placed
        if placement.moves_weights
    }


def stored_elements(plan: Plan, unit: UnitSpec) -> int:
    """Return how many elements of a rank's weight shard of a unit lie on the device after a step, from the first one,
    and are then stored where the shard rests."""
    placement = plan.sharding.placements[unit.name]
    shard = placement.padded(unit.numel) // placement.degrees.weights
    return plan.sharding.offload.resident(unit.name, shard) if placement.writes_at_rest else shard
