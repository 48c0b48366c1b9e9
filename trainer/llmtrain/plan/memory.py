"""The bytes of model states on a rank, and which degrees fit its memory. No torch in here."""

from collections.abc import Callable, Sequence

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.layout import Axis
from llmtrain.cluster.levels import Degrees
from llmtrain.cluster.quantity import quantity
from llmtrain.model.config import GPTConfig
from llmtrain.model.tensors import UnitSpec
from llmtrain.plan.pipeline.stage_layout import StageLayout, units_of
from llmtrain.plan.plan import Plan

# Share of the accelerator's memory for model states; activations and gathered weights need the remainder.
STATES_SHARE = 0.7


def state_bytes(plan: Plan) -> int:
    """Return the bytes of model states on the rank that holds most, without padding."""
    placements, tensor = plan.sharding.placements, plan.grid.degree(Axis.TENSOR)

    def held(unit: UnitSpec) -> int:
        return placements[unit.name].degrees.state_bytes(unit.numel, plan.compute_bytes)

    return max(sum(map(held, units_of(plan.model, layouts, 0, tensor))) for layouts in plan.pipeline.stages)


def largest_share(model: GPTConfig, stages: Sequence[Sequence[StageLayout]], tensor: int) -> int:
    """Return the parameters on the rank of the pipeline and tensor axes that has most, before sharding."""
    return max(sum(unit.numel for unit in units_of(model, held, 0, tensor)) for held in stages)


def fits(cluster: Cluster | None, parameters: int, compute_bytes: int) -> Callable[[Degrees], bool] | None:
    """Return a function that decides whether model states at given degrees fit the accelerator's memory; None if the
    description has no memory."""
    if cluster is None or cluster.accelerator is None or cluster.accelerator.memory is None:
        return None
    limit = STATES_SHARE * quantity(cluster.accelerator.memory, "byte")
    return lambda degrees: degrees.state_bytes(parameters, compute_bytes) <= limit
