"""The sums that keep parameters equal on ranks beyond the data-parallel ones, which hold them too. No torch in here."""

from collections.abc import Iterator, Mapping, Sequence

from llmtrain.cluster.layout import Axis
from llmtrain.model.tensors import UnitSpec
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.instructions import ReplicaSum
from llmtrain.plan.tied_embedding import tied_pair


def partial_elements(plan: Plan, units: Sequence[UnitSpec]) -> Mapping[str, int]:
    """Return the TP-replicated elements of each unit whose gradients tensor-parallel ranks compute in parts."""
    if not plan.sequence_parallel or plan.grid.degree(Axis.TENSOR) == 1:
        return {}
    return {unit.name: unit.numel - unit.replicated for unit in units if unit.replicated < unit.numel}


def final_sums(plan: Plan, rank: int, units: Sequence[UnitSpec]) -> Iterator[ReplicaSum]:
    """Yield the sums of a rank of the run after its last pass, in order. units: of the rank."""
    placements = plan.sharding.placements
    for name, elements in partial_elements(plan, units).items():
        if placements[name].degrees.ranks == 1:
            yield ReplicaSum("partial", name, elements)
    if plan.sharding.quantization.gradients and plan.grid.degree(Axis.TENSOR) > 1:
        yield ReplicaSum("stage", "", sum(unit.numel - unit.replicated for unit in units))
    if tied_pair(plan, rank):
        embedding, placement = next(unit for unit in units if unit.name == "embedding"), placements["embedding"]
        yield ReplicaSum("tied", "embedding", placement.padded(embedding.numel) // placement.degrees.optimizer)


def replica_group(plan: Plan, rank: int, group: str) -> tuple[int, ...]:
    """Return the ranks of a sum's group that `rank` is in."""
    if group == "tied":
        return tied_pair(plan, rank)
    axes = (Axis.TENSOR,) if group == "partial" else (Axis.DATA, Axis.TENSOR)
    return tuple(plan.grid.group_of(rank, *axes))
