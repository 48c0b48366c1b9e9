"""What `zero.resident: auto` stands for: the memory that a run leaves, filled so that slow links carry least.

The memory holds gathered units until their next use, or a secondary copy of all weights and as many gathered units as
then fit. Neither changes a result. No torch in here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from llmtrain.cluster.memory import stated_memory
from llmtrain.plan.degrees import ZeroSettings
from llmtrain.plan.memory.memory_budget import memory_budget, surely_exceeds
from llmtrain.plan.per_rank.roles import roles
from llmtrain.plan.plan import Plan, Sharding
from llmtrain.plan.program.by_rank import programs_of
from llmtrain.plan.program.step_calls import StepCalls
from llmtrain.plan.resolve.resident_check import gathered_bytes


@dataclass(frozen=True)
class Filling:
    """Ways to fill the memory of a plan. plan: with the least memory for gathered weights. sharding: makes the sharding
    of settings. may_copy: whether the recipe leaves open if there is a secondary copy."""

    plan: Plan
    sharding: Callable[[ZeroSettings], Sharding]
    may_copy: bool

    def filled(self, zero: ZeroSettings) -> ZeroSettings:
        """Return settings that fill the stated memory; the given ones where none is stated, no rank has room, or no
        order of gathers leaves a choice.

        Gathers have to match within a group of ranks, and all ranks have one budget, that of the fullest.
        """
        plan = self.plan
        moved = zero.degrees.weights > 1 or plan.sharding.offload.parameters != "device"
        gathers = moved and not plan.pipeline.schedule.message_driven
        if stated_memory(plan.cluster) is None or not gathers or surely_exceeds(plan):
            return zero
        units = self._largest_resident(zero)
        if units is None or not self.may_copy or units.resident == self._whole():
            return units or zero
        found = [units, *(one for one in map(self._largest_resident, self._copies(zero)) if one is not None)]
        return found[0] if len(found) == 1 else min(found, key=lambda one: gather_bytes(self._with(one)))

    def _copies(self, zero: ZeroSettings) -> Iterator[ZeroSettings]:
        """Yield settings with a secondary copy over each group of faster links."""
        levels = next(iter(self.plan.sharding.placements.values())).levels
        for level in levels:
            if 1 < level.span < zero.degrees.weights:
                yield replace(zero, degrees=replace(zero.degrees, secondary=level.span))

    def _largest_resident(self, zero: ZeroSettings) -> ZeroSettings | None:
        """Return settings with as much memory for gathered weights as every rank has, at most for all; with the least
        in which two units are gathered ahead, where that is more on some rank; None if a rank has no room for it."""
        budget = memory_budget(self._with(zero))
        if budget.limit is None or budget.excess:
            return None
        least = [row.device["gathered_weights"] for row in budget.rows]
        free = [budget.limit - row.total + own for row, own in zip(budget.rows, least, strict=True)]
        resident = min(self._whole(), *free)
        return replace(zero, resident=resident if resident >= max(least) else 0)

    def _whole(self) -> int:
        """Return the most bytes of units that a rank gathers."""
        return max(gathered_bytes(self.plan, role.rank) for role in roles(self.plan))

    def _with(self, zero: ZeroSettings) -> Plan:
        return replace(self.plan, sharding=self.sharding(zero))


def gather_bytes(plan: Plan) -> tuple[int, ...]:
    """Return the bytes that all ranks send in a step to gather weights, by tier of links, slowest first."""
    programs = programs_of(plan)
    sent = dict.fromkeys([tier.name for tier in reversed(plan.tiers)], 0)
    for role in roles(plan):
        for call in StepCalls(plan, role.rank, programs(role.rank)).sharding():
            if call.traffic.purpose in ("weights", "secondary"):
                sent[call.traffic.tier] += call.times * call.traffic.sent * role.ranks
    return tuple(sent.values())
