"""What `offload.share: auto` stands for: the least part of the optimizer states with which a plan fits if it leaves. No
torch in here."""

from bisect import bisect_left
from dataclasses import replace

from llmtrain.plan.budget import memory_budget
from llmtrain.plan.facts import Device
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.by_rank import programs_of

# Shares are multiples of one over this number.
STEPS = 64


def least_share(plan: Plan, device: Device) -> float:
    """Return the least share with which a plan fits the stated memory; 1 where none is stated, or where it does not fit
    at all. plan: all optimizer states leave."""
    # What is gathered, and when, does not depend on where optimizer states rest.
    programs = programs_of(plan)
    budget = memory_budget(plan, device, programs)
    if budget.limit is None or budget.excess:
        return 1.0

    def fits(step: int) -> bool:
        offload = replace(plan.sharding.offload, share=step / STEPS)
        other = replace(plan, sharding=replace(plan.sharding, offload=offload))
        return not memory_budget(other, device, programs).excess

    return bisect_left(range(STEPS), True, key=fits) / STEPS
