"""The process groups that a rank joins, as the runtime makes them. No torch in here."""

from collections.abc import Iterator

from llmtrain.cluster.layout import Axis
from llmtrain.plan.pipeline.actions import Schedule
from llmtrain.plan.placement import Placement
from llmtrain.plan.plan import Plan
from llmtrain.plan.tied_embedding import tied_places


def group_sizes(plan: Plan, pipeline: int) -> list[int]:
    """Return the number of ranks of every process group that a rank joins. pipeline: its place along the pipeline
    axis."""
    world = [plan.grid.world] if plan.grid.world > 1 else []
    sharding = (size for one in dict.fromkeys(plan.sharding.placements.values()) for size in _of_placement(one))
    return [*world, *sharding, *_of_tensor(plan), *_of_pipeline(plan, pipeline)]


def _of_placement(placement: Placement) -> Iterator[int]:
    """Yield the groups of `make_hops`: gathers and reductions have their own."""
    for level in placement.levels:
        yield from (level.radix, level.radix)
    if not placement.hierarchical and placement.degrees.weights > 1:
        yield placement.degrees.weights


def _of_tensor(plan: Plan) -> Iterator[int]:
    tensor = plan.grid.degree(Axis.TENSOR)
    if tensor == 1:
        return
    yield tensor
    if plan.sequence_parallel:
        # The sums of TP-replicated gradients, in parallel with those of the layers.
        yield tensor
    if plan.sharding.quantization.gradients:
        # The mean of TP-replicated gradients over a pipeline stage.
        yield plan.grid.degree(Axis.DATA, Axis.TENSOR)


def _of_pipeline(plan: Plan, pipeline: int) -> Iterator[int]:
    schedule = plan.pipeline.schedule
    if plan.pipeline.transport == "torch":
        yield from (2 for _ in _channels(schedule, pipeline))
    if pipeline in tied_places(plan):
        yield 2


def _channels(schedule: Schedule, pipeline: int) -> Iterator[tuple[int, int]]:
    """Yield (source, target) of the stages between which a rank sends or receives; the ways there and back differ."""
    for stage in range(schedule.stages - 1):
        ends = schedule.place(stage)[0], schedule.place(stage + 1)[0]
        if pipeline in ends and ends[0] != ends[1]:
            yield stage, stage + 1
            yield stage + 1, stage
