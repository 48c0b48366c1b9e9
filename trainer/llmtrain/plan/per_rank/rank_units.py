"""The units of a rank of a plan. No torch in here."""

from llmtrain.cluster.layout import Axis
from llmtrain.model.tensors import UnitSpec
from llmtrain.plan.pipeline.stage_layout import units_of
from llmtrain.plan.plan import Plan


def rank_units(plan: Plan, rank: int) -> list[UnitSpec]:
    """Return the units of a rank of the run, in the order of the model, with the shapes that it holds."""
    tensor_rank, parts = plan.grid.coordinate(rank, Axis.TENSOR), plan.grid.degree(Axis.TENSOR)
    return units_of(plan.model, plan.stages_of(rank), tensor_rank, parts)
