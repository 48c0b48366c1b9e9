"""The largest tensors beside activations that a step allocates and frees. No torch in here."""

from itertools import groupby

from llmtrain.cluster.layout import Axis
from llmtrain.model.tensors import UnitSpec
from llmtrain.plan.plan import Plan
from llmtrain.plan.roles import Role


def temporary_bytes(plan: Plan, role: Role) -> int:
    """Return the most bytes of temporary tensors at once on each rank of a role.

    Autograd holds one parameter's gradient in the compute dtype until it is added to the sum. After the last backward
    pass, quantized runs with tensor parallelism take the mean of all TP-replicated gradients in fp32. Optimizer kernels
    work in place.
    """
    gradient = max(largest_parameter(unit) for unit in role.units) * plan.compute_bytes
    averaged = 0
    if plan.sharding.quantization.gradients and plan.grid.degree(Axis.TENSOR) > 1:
        averaged = 4 * sum(unit.numel - unit.replicated for unit in role.units)
    return max(gradient, averaged)


def largest_parameter(unit: UnitSpec) -> int:
    """Return the elements of a unit's largest module parameter; neighbours that share one are stacked."""
    sizes = (
        sum(end - start for _, start, end in stacked)
        for _, stacked in groupby(_held(unit), key=lambda tensor: tensor[0])
    )
    return max(sizes)


def _held(unit: UnitSpec) -> list[tuple[str, int, int]]:
    return [(tensor.parameter, *tensor.held) for tensor in unit.tensors]
