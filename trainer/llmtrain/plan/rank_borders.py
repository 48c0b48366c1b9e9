"""The activations that a rank of a plan moves, and the memory and files that they take. No torch in here."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from llmtrain.cluster.layout import Axis
from llmtrain.plan.activation_offload import BorderMoves, border_moves
from llmtrain.plan.facts import Device
from llmtrain.plan.pipeline.stage_layout import StageLayout
from llmtrain.plan.placement import PAGE
from llmtrain.plan.plan import Plan
from llmtrain.plan.saved_tensors import Sizes

# Buffers on a GPU for borders that come back: one is used while the next one is copied.
DEVICE_SLOTS = 2


def border_bytes(plan: Plan) -> int:
    """Return the bytes of what one block or stage passes to the next: `[sequences, tokens, hidden]` in the compute
    dtype. With sequence parallelism each rank has a share of the tokens."""
    return Sizes.of(plan).own * plan.model.hidden * plan.compute_bytes


def group_count(plan: Plan, layout: StageLayout) -> int:
    """Return the number of recomputed groups of a stage; 0 without recomputation."""
    return -(-(layout.end - layout.first) // plan.recompute) if plan.recompute else 0


def rank_moves(plan: Plan, rank: int) -> BorderMoves:
    """Return what happens to the borders of a rank of the run in each step; nothing without offload."""
    place, offload = plan.grid.coordinate(rank, Axis.PIPELINE), plan.activation_offload
    if offload.tier == "none":
        return BorderMoves()
    groups = [group_count(plan, layout) for layout in plan.stages_of(rank)]
    return border_moves(plan.pipeline.schedule.actions[place], groups, offload.stay[place])


def left_groups(plan: Plan, rank: int) -> Mapping[tuple[int, int], int]:
    """Return the number of borders that leave, by (microbatch, chunk)."""
    moves = rank_moves(plan, rank)
    return Counter((save.border.microbatch, save.border.chunk) for save in moves.saves if save.region is not None)


@dataclass(frozen=True)
class BorderMemory:
    """device: bytes of the buffers of a GPU for borders that come back. host: bytes of borders in the host's memory.
    buffers: bytes of the host's buffers through which borders in files pass. files: bytes of borders in files. moved:
    bytes that leave in a step, and come back."""

    device: int = 0
    host: int = 0
    buffers: int = 0
    files: int = 0
    moved: int = 0


def border_memory(plan: Plan, rank: int, device: Device) -> BorderMemory:
    """Return what the borders that leave a rank of the run take. device: what it computes on."""
    moves, border = rank_moves(plan, rank), border_bytes(plan)
    if not moves.left:
        return BorderMemory()
    slots = DEVICE_SLOTS * border if device == "cuda" else 0
    if plan.activation_offload.tier == "host":
        return BorderMemory(slots, host=moves.regions * border, moved=moves.left * border)
    paged = in_pages(border)
    return BorderMemory(
        slots,
        buffers=(moves.read_slots + moves.write_slots) * paged + PAGE,
        files=moves.regions * paged,
        moved=moves.left * paged,
    )


def in_pages(nbytes: int) -> int:
    """Return the bytes of whole pages that hold `nbytes`."""
    return -(-nbytes // PAGE) * PAGE
