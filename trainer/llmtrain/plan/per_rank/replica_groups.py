"""The groups of ranks beyond the data-parallel ones that hold the same parameters. No torch in here.

partial: the tensor-parallel ranks, each of which has a part of the gradients of TP-replicated parameters (sequence
parallelism). stage: all ranks of a pipeline stage, if their gradients of TP-replicated parameters would differ. tied:
the ranks of the first and the last stage that hold the two copies of a tied embedding.
"""

from collections.abc import Mapping
from typing import Literal, get_args

from llmtrain.cluster.layout import Axis
from llmtrain.plan.per_rank.tied_embedding import tied_pair, tied_pairs
from llmtrain.plan.plan import Plan

ReplicaGroup = Literal["partial", "stage", "tied"]
REPLICA_GROUPS: tuple[ReplicaGroup, ...] = get_args(ReplicaGroup)


def replica_groups(plan: Plan, rank: int) -> dict[ReplicaGroup, tuple[int, ...]]:
    """Return the groups that a rank of the run is in, by name, in the order in which they are made. Each has its ranks
    in order."""
    found: dict[ReplicaGroup, tuple[int, ...]] = {
        name: tuple(plan.grid.group_of(rank, *axes)) for name, axes in _axes(plan).items()
    }
    pair = tied_pair(plan, rank)
    return {**found, "tied": pair} if pair else found


def all_replica_groups(plan: Plan) -> dict[ReplicaGroup, list[tuple[int, ...]]]:
    """Return the groups of all ranks, which are disjoint for each name, in the same order."""
    found: dict[ReplicaGroup, list[tuple[int, ...]]] = {
        name: list(map(tuple, plan.grid.groups(*axes))) for name, axes in _axes(plan).items()
    }
    pairs = tied_pairs(plan)
    return {**found, "tied": pairs} if pairs else found


def _axes(plan: Plan) -> Mapping[ReplicaGroup, tuple[Axis, ...]]:
    """Return the axes of the groups that lie in one stage."""
    # The axes along which ranks hold the same TP-replicated parameters.
    copies = (Axis.TENSOR,)
    if plan.grid.degree(*copies) == 1:
        return {}
    found: dict[ReplicaGroup, tuple[Axis, ...]] = {}
    if plan.sequence_parallel:
        found["partial"] = copies
    if plan.averages_replicas:
        found["stage"] = (Axis.DATA, *copies)
    return found
