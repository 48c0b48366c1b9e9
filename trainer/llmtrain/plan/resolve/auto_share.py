"""What `auto` of `offload.share`, `offload.spare` and `offload.spare_weights` stands for. No torch in here.

The least part of the optimizer states with which a plan fits if it leaves, or all of them where gathered weights use
the memory better; the most of that part that the host has spare memory for; the device if it has room for weights.
"""

from bisect import bisect_left
from dataclasses import replace

from llmtrain.cluster.memory import stated_host_memory
from llmtrain.plan.memory.memory_budget import memory_budget, surely_exceeds
from llmtrain.plan.per_rank.rank_buckets import steps_ahead
from llmtrain.plan.per_rank.roles import roles
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.by_rank import programs_of
from llmtrain.plan.resolve.unit_shares import with_share

# Shares are multiples of one over this number.
STEPS = 64
# Spare shares are multiples of one over this number; and the one for hosts whose memory is not stated.
EIGHTHS, UNKNOWN = 8, 0.25


def least_share(plan: Plan) -> float:
    """Return the least share with which a plan fits the stated memory; 1 where none is stated, or where it does not fit
    at all. plan: all optimizer states leave."""
    if surely_exceeds(plan):
        return 1.0
    # What is gathered, and when, does not depend on where optimizer states rest.
    programs, every_role = programs_of(plan), roles(plan)
    budget = memory_budget(plan, programs)
    if budget.limit is None or budget.excess:
        return 1.0

    def fits(step: int) -> bool:
        other = replace(plan, sharding=with_share(plan.sharding, every_role, step / STEPS))
        return not memory_budget(other, programs).excess

    return bisect_left(range(STEPS), True, key=fits) / STEPS


def most_spare(plan: Plan) -> float:
    """Return the share of the offloaded states that may be stepped before the norm is known. plan: without it."""
    offload = plan.sharding.offload
    if plan.device == "cpu" or offload.tier != "host" or not offload.share:
        # The CPU that would step them computes, or files would take more than their volumes have.
        return 0.0

    def with_spare(eighths: int) -> Plan:
        return replace(plan, sharding=replace(plan.sharding, offload=replace(offload, spare=eighths / EIGHTHS)))

    if not steps_ahead(with_spare(EIGHTHS)):
        return 0.0
    programs, known = programs_of(plan), stated_host_memory(plan.cluster, plan.grid.world) is not None
    most = EIGHTHS if known else int(UNKNOWN * EIGHTHS)

    def exceeds(eighths: int) -> bool:
        return memory_budget(with_spare(eighths), programs).exceeds

    return bisect_left(range(1, most + 1), True, key=exceeds) / EIGHTHS


def keeps_weights_ahead(plan: Plan, ahead: Plan) -> bool:
    """Return whether the stated memory of the device has room for the weights of what is stepped ahead beside all that
    it holds without them. plan, ahead: where they wait on the host, and on the device."""
    if ahead.sharding.offload.spare_weights == "host" or plan.activation_offload.tier != "none":
        return False
    budget = memory_budget(ahead)
    same = replace(ahead.sharding, offload=plan.sharding.offload) == plan.sharding
    return same and budget.limit is not None and not budget.excess
