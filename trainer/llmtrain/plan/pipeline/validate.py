"""Checks that a schedule is complete, in order and free of deadlock; for tests of the schedules. Without torch."""

from collections import Counter

from llmtrain.plan.pipeline.actions import Action, Kind, Schedule
from llmtrain.plan.pipeline.timeline import Durations, simulate


def validate(schedule: Schedule) -> None:
    """Raise ValueError unless all of this holds:

    - Every rank runs each action of its chunks exactly once for each microbatch: F, B and, with a split backward pass,
      W.
    - The schedule ends when receives block and sends do not.
    - On each channel (activations from stage s to s+1, gradients from s+1 to s), messages are received in the order in
      which they are sent, so that a first-in, first-out transport is enough.
    """
    kinds = (Kind.F, Kind.B, Kind.W) if schedule.splits_backward else (Kind.F, Kind.B)
    once = Counter(
        Action(index, chunk, kind)
        for index in range(schedule.microbatches)
        for chunk in range(schedule.chunks)
        for kind in kinds
    )
    if len(schedule.actions) != schedule.ranks:
        raise ValueError(f"the schedule has actions of {len(schedule.actions)} ranks; expected {schedule.ranks}")
    for rank, order in enumerate(schedule.actions):
        found = Counter(order)
        for action in (once - found) + (found - once):
            raise ValueError(f"rank {rank} does {action} {found[action]} times; expected {once[action]}")
    simulate(schedule, Durations.even(schedule.stages))
    _check_channels(schedule)


def _check_channels(schedule: Schedule) -> None:
    orders: dict[tuple[Kind, int], list[int]] = {}
    for rank, order in enumerate(schedule.actions):
        for action in order:
            orders.setdefault((action.kind, schedule.stage(rank, action.chunk)), []).append(action.microbatch)
    for stage in range(schedule.stages - 1):
        for kind, what in ((Kind.F, "activations"), (Kind.B, "gradients")):
            if orders[kind, stage] != orders[kind, stage + 1]:
                raise ValueError(
                    f"stages {stage} and {stage + 1} handle microbatches in different orders, but their {what} arrive "
                    "in the order in which they are sent"
                )
