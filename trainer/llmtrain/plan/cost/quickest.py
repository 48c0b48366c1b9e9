"""Which of several plans of a run takes least time. No torch in here."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain.plan.cost.lane_times import LINK, LaneTime, lane_times, volume_paths
from llmtrain.plan.cost.least_time import computed_flops, least_time
from llmtrain.plan.cost.volume_traffic import moved_of
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.by_rank import programs_of


@dataclass(frozen=True)
class _Work:
    """What a plan computes and moves in a step."""

    plan: Plan
    lanes: Sequence[LaneTime]
    compute: float | None

    @classmethod
    def of(cls, plan: Plan) -> "_Work":
        programs = programs_of(plan)
        lanes = lane_times(plan, programs, moved_of(plan, programs))
        return cls(plan, lanes, least_time(plan, lanes).compute)

    @property
    def known(self) -> bool:
        """Whether the rates of all lanes are known."""
        return all(lane.rate is not None for lane in self.lanes)

    @property
    def seconds(self) -> float:
        """The time of the busiest lane."""
        return max((lane.seconds or 0.0 for lane in self.lanes), default=0.0)

    @property
    def nbytes(self) -> int:
        """The bytes of the busiest link or volume. A CPU has no link, and the rate of its memory may be unknown."""
        moving = (LINK, *volume_paths(self.plan))
        return max((lane.nbytes for lane in self.lanes if lane.name in moving), default=0)


def quickest(*plans: Plan) -> Plan:
    """Return the plan, of some of one run, whose computation and busiest lane take the least time side by side. Where a
    rate is not known, the busiest lane counts in proportion to what is computed."""
    if len(plans) == 1:
        return plans[0]
    works = [_Work.of(plan) for plan in plans]
    known = all(work.known for work in works)

    def cost(work: _Work) -> tuple[float, float]:
        moved = work.seconds if known else float(work.nbytes)
        if known and work.compute is not None:
            return max(work.compute, moved), moved
        # A third more work has to pay with a third fewer bytes.
        return moved * computed_flops(work.plan), 0.0

    return min(works, key=cost).plan


def waits_for_moves(plan: Plan) -> bool:
    """Return whether a plan's busiest lane may take longer than its computation."""
    work = _Work.of(plan)
    return not work.known or work.compute is None or work.seconds > work.compute
