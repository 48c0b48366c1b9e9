"""The two copies of a tied embedding, in the first and the last pipeline stage. No torch in here.

Each copy gets the gradients of its own stage, from the lookups or from the head. `llmtrain.sharding.replica_groups`
sums them over the two ranks at the end of a step's passes, so both copies stay equal. `llmtrain.training.build` makes
the groups of these sums.
"""

from llmtrain.cluster.layout import Axis
from llmtrain.plan.plan import Plan


def tied_pairs(plan: Plan) -> list[tuple[int, ...]]:
    """Return all pairs of ranks that hold the two copies of a tied embedding, each in the order of the stages."""
    pipeline_ranks = _pipeline_ranks(plan)
    return (
        [tuple(line[pipeline_rank] for pipeline_rank in pipeline_ranks) for line in plan.grid.groups(Axis.PIPELINE)]
        if pipeline_ranks
        else []
    )


def tied_pair(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return the pair of ranks that hold the two copies of a tied embedding, if `rank` is one of them."""
    line = plan.grid.group_of(rank, Axis.PIPELINE)
    pair = tuple(line[pipeline_rank] for pipeline_rank in _pipeline_ranks(plan))
    return pair if rank in pair else ()


def holds_second_copy(plan: Plan, rank: int) -> bool:
    """Return whether a rank holds the copy of the last stage, which checkpoints and norms leave out."""
    return tied_pair(plan, rank)[1:] == (rank,)


def _pipeline_ranks(plan: Plan) -> tuple[int, ...]:
    """Return the two pipeline ranks that hold a copy of a tied embedding; none if there is only one copy, or if the
    embedding is not tied."""
    schedule = plan.pipeline.schedule
    first, last = (schedule.rank_and_chunk(stage)[0] for stage in (0, schedule.stages - 1))
    return (first, last) if plan.model.tie_embeddings and first != last else ()
