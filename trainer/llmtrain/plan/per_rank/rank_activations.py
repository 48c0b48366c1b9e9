"""The activations that a rank of a plan moves, and the memory and files that they take. No torch in here."""

from dataclasses import dataclass
from functools import lru_cache

from llmtrain.cluster.layout import Axis
from llmtrain.plan.activation_offload import ActivationCounts, ActivationMoves, activation_counts, activation_moves
from llmtrain.plan.per_rank.saved_tensors import Sizes
from llmtrain.plan.pipeline.actions import Action
from llmtrain.plan.placement import PAGE
from llmtrain.plan.plan import Plan

# Buffers on a GPU for group inputs that come back: one is used while the next one is copied.
DEVICE_SLOTS = 2


def boundary_bytes(plan: Plan) -> int:
    """Return the bytes of what one block or stage passes to the next: `[sequences, tokens, hidden]` in the compute
    dtype. With sequence parallelism each rank has a share of the tokens."""
    return Sizes.of(plan).own * plan.model.hidden * plan.compute_bytes


def rank_moves(plan: Plan, rank: int) -> ActivationMoves:
    """Return what happens to the group inputs of a rank of the run in each step; nothing without offload."""
    return ActivationMoves() if plan.activation_offload.tier == "none" else activation_moves(*_schedule(plan, rank))


def rank_counts(plan: Plan, rank: int) -> ActivationCounts:
    """Return what `rank_moves` come to."""
    return ActivationCounts({}, 0) if plan.activation_offload.tier == "none" else _counts(*_schedule(plan, rank))


def _schedule(plan: Plan, rank: int) -> tuple[tuple[Action, ...], tuple[int, ...], int]:
    """Return a rank's actions, the groups of its chunks, and the number of group inputs that stay."""
    pipeline_rank = plan.grid.coordinate(rank, Axis.PIPELINE)
    groups = tuple(len(layout.groups) for layout in plan.stages_of(rank))
    return plan.pipeline.schedule.actions[pipeline_rank], groups, plan.activation_offload.stay[pipeline_rank]


# Several lines of a budget ask for the same counts.
_counts = lru_cache(maxsize=256)(activation_counts)


@dataclass(frozen=True)
class ActivationMemory:
    """device: bytes of the buffers of a GPU for group inputs that come back. host: bytes of group inputs in the host's
    memory. buffers: bytes of the host's buffers through which group inputs in files pass. files: bytes of group inputs
    in files. moved: bytes that leave in a step, and come back."""

    device: int = 0
    host: int = 0
    buffers: int = 0
    files: int = 0
    moved: int = 0


def activation_memory(plan: Plan, rank: int) -> ActivationMemory:
    """Return what the group inputs that leave a rank of the run take."""
    moves, group_input = rank_counts(plan, rank), boundary_bytes(plan)
    if not moves.left:
        return ActivationMemory()
    slots = DEVICE_SLOTS * group_input if plan.device == "cuda" else 0
    if plan.activation_offload.tier == "host":
        return ActivationMemory(slots, host=moves.regions * group_input, moved=moves.left * group_input)
    paged = in_pages(group_input)
    return ActivationMemory(
        slots,
        buffers=(moves.read_slots + moves.write_slots) * paged + PAGE,
        files=moves.regions * paged,
        moved=moves.left * paged,
    )


def in_pages(nbytes: int) -> int:
    """Return the bytes of whole pages that hold `nbytes`."""
    return -(-nbytes // PAGE) * PAGE
