"""The two copies of a tied embedding, in the first and the last pipeline stage. No torch in here."""

from llmtrain.cluster.layout import Axis
from llmtrain.plan.plan import Plan


def tied_pair(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return the ranks that hold the two copies of a tied embedding, if `rank` is one of them."""
    schedule, line = plan.pipeline.schedule, plan.grid.group_of(rank, Axis.PIPELINE)
    ends = [schedule.place(stage)[0] for stage in (0, schedule.stages - 1)]
    pair = tuple(line[end] for end in ends)
    return pair if plan.model.tie_embeddings and ends[0] != ends[1] and rank in pair else ()
