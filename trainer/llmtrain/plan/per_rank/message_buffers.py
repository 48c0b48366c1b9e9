"""The shared-memory slots through which messages between pipeline stages go. No torch in here."""

from math import ceil

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.tiers import node_ranks
from llmtrain.plan.collective_buffers import backend_of
from llmtrain.plan.per_rank.rank_activations import boundary_bytes
from llmtrain.plan.plan import Plan

MESSAGE_SLOT_BYTES = 1 << 20
"""Most bytes of a slot. A longer message takes several slots, and the receiver reads one while the next is written."""

MOST_SLOTS = 2048
"""Slots of a channel: a pipe surely holds the numbers of as many."""


def message_slots(ahead: int, nbytes: int) -> tuple[int, int]:
    """Return the number of a channel's slots and the bytes of each. ahead: messages of `nbytes` that fit into them."""
    # Slots begin at cache lines.
    width = min(MESSAGE_SLOT_BYTES, -(-nbytes // 64) * 64)
    return min(ahead * -(-nbytes // width), MOST_SLOTS), width


def messages_ahead(plan: Plan) -> int:
    """Return the messages that a channel has in flight; at least two, so that one can arrive during a computation."""
    schedule = plan.pipeline.schedule
    if schedule.message_driven:
        return max(2, plan.pipeline.limit)
    return max(2, ceil(schedule.most_live / schedule.chunks))


def ring_bytes(plan: Plan, rank: int) -> int:
    """Return the bytes of the slots that the messages of a rank of the run go through to ranks of its node."""
    if plan.pipeline.transport != "torch" or plan.device == "cuda":
        return 0
    schedule, line = plan.pipeline.schedule, plan.grid.group_of(rank, Axis.PIPELINE)
    neighbours = [
        line[schedule.rank_and_chunk(other)[0]]
        for layout in plan.stages_of(rank)
        for other in (layout.stage - 1, layout.stage + 1)
        if 0 <= other < schedule.stages
    ]
    node = node_ranks(plan.tiers)
    inside = [
        other for other in neighbours if other != rank and backend_of(plan.device, (rank, other), node) == "shared"
    ]
    if not inside:
        return 0
    slots, width = message_slots(messages_ahead(plan), boundary_bytes(plan))
    return slots * width * len(inside)
