"""The optimizer states that a rank's processor or device steps, and the bytes that this reads and writes. No torch in
here."""

from dataclasses import dataclass

from llmtrain.cluster.layout import Axis
from llmtrain.plan.per_rank.rank_buckets import rank_buckets
from llmtrain.plan.per_rank.rank_units import rank_units
from llmtrain.plan.per_rank.states import StateBytes, state_bytes
from llmtrain.plan.plan import Plan

# Units whose stepped weights are waited for, and begin to be gathered, before the first of them computes.
UPDATED_TOGETHER = 2


@dataclass(frozen=True)
class SteppedElements:
    """Elements that AdamW steps. nbytes: that this reads and writes."""

    elements: int
    nbytes: int


def stepped_by_cpu(plan: Plan, rank: int) -> SteppedElements:
    """Return what the host's processors step of a rank's states."""
    offloaded = [] if plan.device != "cpu" and plan.sharding.offload.on_device else rank_buckets(plan, rank)
    elements = sum(one.numel for one in offloaded)
    separate = any(one.states == 3 for one in offloaded)
    if plan.device == "cpu":
        stays = state_bytes(rank_units(plan, rank), plan.sharding, plan.compute_bytes, plan.grid.degree(Axis.TENSOR))
        elements += stays.moments // 8
        separate = separate or stays.masters > 0
    return SteppedElements(elements, elements * _element_bytes(plan, separate))


def stepped_by_device(plan: Plan, rank: int) -> SteppedElements:
    """Return what a rank's device steps of the offloaded states."""
    offloaded = rank_buckets(plan, rank) if plan.device != "cpu" and plan.sharding.offload.on_device else []
    elements = sum(one.numel for one in offloaded)
    return SteppedElements(elements, elements * _element_bytes(plan, any(one.states == 3 for one in offloaded)))


def resident_step_bytes(plan: Plan, states: StateBytes) -> int:
    """Return the bytes that a step of states which stay on a device reads and writes."""
    return states.moments // 8 * _element_bytes(plan, states.masters > 0)


def _element_bytes(plan: Plan, separate: bool) -> int:
    """Return the bytes that a step of one element reads and writes: master and moments both ways, the gradient, and the
    new weight where that is not the master. separate: whether it is not."""
    return 2 * (4 + 8) + plan.gradient_bytes + (plan.compute_bytes if separate else 0)
