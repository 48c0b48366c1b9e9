"""The sums that keep parameters equal on ranks beyond the data-parallel ones, which hold them too. No torch in here."""

from collections.abc import Iterator, Mapping, Sequence

from llmtrain.model.tensors import UnitSpec
from llmtrain.plan.per_rank.replica_groups import replica_groups
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.instructions import ReplicaSum


def partial_elements(plan: Plan, rank: int, units: Sequence[UnitSpec]) -> Mapping[str, int]:
    """Return the TP-replicated elements of each unit whose gradients tensor-parallel ranks compute in parts. units: of
    a rank of the run."""
    if "partial" not in replica_groups(plan, rank):
        return {}
    return {unit.name: unit.replicated_numel for unit in units if unit.replicated_numel}


def final_sums(plan: Plan, rank: int, units: Sequence[UnitSpec]) -> Iterator[ReplicaSum]:
    """Yield the sums of a rank of the run after its last pass, in order. units: of the rank."""
    placements, groups = plan.sharding.placements, replica_groups(plan, rank)
    for name, elements in partial_elements(plan, rank, units).items():
        if placements[name].degrees.ranks == 1:
            yield ReplicaSum("partial", name, elements)
    if "stage" in groups:
        yield ReplicaSum("stage", "", sum(unit.replicated_numel for unit in units))
    if "tied" in groups:
        embedding, placement = next(unit for unit in units if unit.name == "embedding"), placements["embedding"]
        yield ReplicaSum("tied", "embedding", placement.padded(embedding.numel) // placement.degrees.optimizer)
