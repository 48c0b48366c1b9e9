"""The process groups that a rank joins, as the runtime makes them. No torch in here."""

from collections.abc import Iterator, Sequence

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.tiers import node_ranks
from llmtrain.plan.collective_buffers import CTAS, LANE_CTAS
from llmtrain.plan.per_rank.replica_groups import replica_groups
from llmtrain.plan.pipeline.actions import Schedule
from llmtrain.plan.placement import Placement
from llmtrain.plan.plan import Plan


def group_sizes(plan: Plan, pipeline_rank: int) -> list[int]:
    """Return the number of ranks of every process group that a rank joins. pipeline_rank: its coordinate along the
    pipeline axis."""
    world = [plan.grid.world] if plan.grid.world > 1 else []
    sharding = (size for one in dict.fromkeys(plan.sharding.placements.values()) for size in _of_placement(one))
    tensor = [degree] if (degree := plan.grid.degree(Axis.TENSOR)) > 1 else []
    messages = [2] * message_groups(plan, pipeline_rank)
    rank = plan.grid.group_of(0, Axis.PIPELINE)[pipeline_rank]
    return [*world, *sharding, *tensor, *messages, *map(len, replica_groups(plan, rank).values())]


def message_groups(plan: Plan, pipeline_rank: int) -> int:
    """Return how many of them carry messages between pipeline stages: one for each channel."""
    return len(list(_channels(plan.pipeline.schedule, pipeline_rank))) if plan.pipeline.transport == "torch" else 0


def connections(plan: Plan, pipeline_rank: int) -> int:
    """Return the channels of all connections that NCCL's all-to-alls make between a rank and the others of its node:
    sums of gradients that are not sent in fp32, and of layers whose tokens tensor-parallel ranks share.
    pipeline_rank: the rank's coordinate along the pipeline axis."""
    rank, packed = plan.grid.group_of(0, Axis.PIPELINE)[pipeline_rank], bool(plan.sharding.quantization.gradients)
    found = 0
    if plan.compute != "fp32" or packed:
        for placement in dict.fromkeys(plan.sharding.placements.values()):
            line, data_rank = plan.grid.group_of(rank, *placement.axes), plan.grid.coordinate(rank, *placement.axes)
            for level in placement.levels:
                found += LANE_CTAS * _in_node(plan, rank, [line[other] for other in level.members(data_rank)])
    if plan.compute != "fp32" and plan.sequence_parallel:
        found += CTAS * _in_node(plan, rank, plan.grid.group_of(rank, Axis.TENSOR))
    return found


def _in_node(plan: Plan, rank: int, members: Sequence[int]) -> int:
    """Return how many of a group's other ranks are in the node of a rank."""
    node = node_ranks(plan.tiers)
    return sum(one // node == rank // node for one in members) - 1


def _of_placement(placement: Placement) -> Iterator[int]:
    """Yield the groups of `make_hops`: gathers and reductions have their own."""
    for level in placement.levels:
        yield from (level.radix, level.radix)
    if not placement.hierarchical and placement.degrees.weights > 1:
        yield placement.degrees.weights


def _channels(schedule: Schedule, pipeline_rank: int) -> Iterator[tuple[int, int]]:
    """Yield (source, target) of the stages between which a rank sends or receives; the ways there and back differ."""
    for stage in range(schedule.stages - 1):
        ends = schedule.rank_and_chunk(stage)[0], schedule.rank_and_chunk(stage + 1)[0]
        if pipeline_rank in ends and ends[0] != ends[1]:
            yield stage, stage + 1
            yield stage + 1, stage
