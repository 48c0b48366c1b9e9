"""The bytes of activations that a rank keeps between forward and backward passes. No torch in here.

`plan.per_rank.saved_tensors` names the tensors of each unit. Bytes are those of tensors, without the
allocator's rounding. What a transport holds while it sends or receives does not count.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from operator import add

from llmtrain.cluster.layout import Axis
from llmtrain.plan.per_rank.rank_activations import boundary_bytes, rank_counts
from llmtrain.plan.per_rank.saved_tensors import (
    Sizes,
    block_tensors,
    deferred_block_tensors,
    deferred_end_tensors,
    embedding_tensors,
    head_tensors,
    total,
)
from llmtrain.plan.pipeline.actions import Action, Kind, computations
from llmtrain.plan.pipeline.stage_layout import StageLayout
from llmtrain.plan.plan import Plan

# A loss stays until the end of its step: one fp32 number.
LOSS_BYTES = 4


def unit_activations(plan: Plan, layout: StageLayout, unit: str, tensor_rank: int | None = None) -> int:
    """Return the bytes that a unit keeps for one microbatch after its forward pass.

    With recomputation, the first block of a group keeps the group's input, and the others keep nothing. tensor_rank:
    None for the last one, which has the most rows of the vocabulary. The same holds for the other functions.
    Raises ValueError if the stage does not have the unit.
    """
    if unit not in layout.units:
        raise ValueError(f"stage {layout.stage} has no unit {unit}; it has {', '.join(layout.units)}")
    sizes = Sizes.of(plan, tensor_rank)
    if unit == "embedding":
        # A tied head keeps nothing of the embedding but its weights.
        return total(embedding_tensors(plan, sizes)) if layout.opens else 0
    if unit == "head":
        return total(head_tensors(plan, sizes))
    if not layout.groups:
        return total(block_tensors(plan, sizes))
    leads = int(unit.removeprefix("blocks.")) in {group.start for group in layout.groups}
    return boundary_bytes(plan) + (plan.kernels.generator if plan.model.dropout else 0) if leads else 0


def stage_activations(plan: Plan, layout: StageLayout, tensor_rank: int | None = None) -> int:
    """Return the bytes that a stage keeps for one microbatch, its input included. Its output counts in the next stage:
    a rank that sends it keeps nothing of it."""
    return sum(unit_activations(plan, layout, unit, tensor_rank) for unit in layout.units)


def recomputed_peak(plan: Plan, layout: StageLayout) -> int:
    """Return the bytes that the recomputation of the stage's largest group adds in a backward pass; 0 without."""
    if not layout.groups:
        return 0
    # The first input is there already.
    return len(layout.groups[0]) * total(block_tensors(plan, Sizes.of(plan))) - boundary_bytes(plan)


def deferred_bytes(plan: Plan, layout: StageLayout, tensor_rank: int | None = None) -> int:
    """Return the bytes that a microbatch keeps between the backward pass of its inputs and that of its weights; 0 if
    the stage never runs them apart."""
    schedule = plan.pipeline.schedule
    if not schedule.splits_backward and (layout.opens or not schedule.hands_back):
        return 0
    sizes = Sizes.of(plan, tensor_rank)
    blocks = (layout.end - layout.first) * total(deferred_block_tensors(plan, sizes))
    return blocks + total(deferred_end_tensors(plan, sizes, layout.opens, layout.closes))


def live_activations(plan: Plan, rank: int) -> int:
    """Return the most bytes that a rank of the run keeps between two of its actions: all chunks and all microbatches
    that are alive at the same time, without what offload has moved. What happens inside of an action comes on top, such
    as `recomputed_peak`.

    Message-driven: the most that `limit` allows, which the order of arrivals need not reach. The last stage runs each
    backward pass directly after the forward pass.
    """
    schedule, layouts = plan.pipeline.schedule, plan.stages_of(rank)
    tensor_rank = plan.grid.coordinate(rank, Axis.TENSOR)
    kept = [stage_activations(plan, layout, tensor_rank) for layout in layouts]
    if schedule.message_driven:
        most = 1 if layouts[0].closes else min(plan.pipeline.limit, schedule.microbatches)
        losses = LOSS_BYTES * (schedule.microbatches - most) if layouts[0].closes else 0
        return most * kept[0] + losses
    changes = {
        (chunk, kind): _change(plan, layouts, chunk, kind, kept[chunk], tensor_rank)
        for chunk in range(len(layouts))
        for kind in Kind
    }
    actions = schedule.actions[plan.grid.coordinate(rank, Axis.PIPELINE)]
    added = map(changes.__getitem__, computations(actions))
    if left := rank_counts(plan, rank).passes:
        added = map(add, added, _moved(actions, left, boundary_bytes(plan)))
    return max(accumulate(added))


def _moved(actions: Iterable[Action], left: Mapping[tuple[int, int], int], group_input: int) -> Iterator[int]:
    """Yield for each action the bytes that it adds because of offload: what has left is not added by the forward pass,
    and not freed by the backward pass. left: group inputs that leave, by (microbatch, chunk)."""
    for action in actions:
        moved = group_input * left.get((action.microbatch, action.chunk), 0)
        yield moved * ((action.kind is Kind.B) - (action.kind is Kind.F))


def _change(plan: Plan, layouts: tuple[StageLayout, ...], chunk: int, kind: Kind, kept: int, tensor_rank: int) -> int:
    """Return the bytes that an action adds to what its rank keeps. kept: `stage_activations` of the action's chunk."""
    layout, splits = layouts[chunk], plan.pipeline.schedule.splits_backward
    deferred = deferred_bytes(plan, layout, tensor_rank) if splits else 0
    if kind is Kind.W:
        return -deferred
    # Between two stages of one rank, an output or a gradient waits in memory for the other stage.
    stages = {other.stage for other in layouts}
    boundary = boundary_bytes(plan) * ((layout.stage + 1 in stages) - (layout.stage - 1 in stages))
    if kind is Kind.F:
        return kept + boundary
    return deferred - kept - boundary + (LOSS_BYTES if layout.closes else 0)
