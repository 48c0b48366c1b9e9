"""Schedules that run the backward pass of the weights where a rank would otherwise wait (Qi et al. 2024).

Each schedule starts as an order of forward and input backward passes for each rank. Weight backward passes then fill
the gaps. To find the gaps, the order is simulated with passes that all take the same time, and with a limit on the
microbatches whose activations a rank holds.
"""

from collections import deque
from collections.abc import Mapping
from math import inf

from llmtrain.plan.pipeline.actions import Action, Kind, Schedule
from llmtrain.plan.pipeline.timeline import needs


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1 (Qi et al. 2024, Zero Bubble Pipeline Parallelism, section 2.1 and figure 3): the order of 1F1B. Each rank
    holds activations of at most p microbatches, as the first rank of 1F1B does.

    With m >= p microbatches a step takes 3m+p-1, of which p-1 is idle: a third of 1F1B's 3(p-1). With m < p it takes
    p-m more.
    """
    orders = []
    for rank in range(ranks):
        order = _Order(microbatches)
        order.add(ranks - 1 - rank, (Kind.F, 0))
        while not order.ended(Kind.F, 0):
            order.add(1, (Kind.F, 0), (Kind.B, 0))
        orders.append(order.finish((Kind.B, 0)))
    return _fill(
        Schedule(ranks=ranks, chunks=1, microbatches=microbatches, actions=tuple(orders), splits_backward=True), ranks
    )


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V (Qi et al. 2024, Zero Bubble Pipeline Parallelism, section 6): each rank holds two stages of half the size.
    The stages go down the ranks and back up, so that the first rank computes the loss. Each rank holds activations of
    at most 2p microbatches of one stage.

    With m >= p microbatches a step takes 6m+p-1 in units of a forward pass of one stage, of which p-1 is idle: a sixth
    of 1F1B's 6(p-1). It is the time that the first forward pass takes to reach the last rank.
    """
    first, second = 0, 1
    orders = []
    for rank in range(ranks):
        order = _Order(microbatches)
        # As many as fit until the first microbatch comes back up.
        order.add(2 * (ranks - rank) - 1, (Kind.F, first))
        order.add(rank, (Kind.F, second), (Kind.F, first))
        order.add(ranks - rank, (Kind.F, second), (Kind.B, second))
        while not order.ended(Kind.F, first):
            order.add(1, (Kind.B, first), (Kind.F, first), (Kind.F, second), (Kind.B, second))
        orders.append(order.finish((Kind.B, first), (Kind.F, second), (Kind.B, second)))
    schedule = Schedule(
        ranks=ranks, chunks=2, microbatches=microbatches, actions=tuple(orders), folded=True, splits_backward=True
    )
    return _fill(schedule, 2 * ranks)


class _Order:
    """A rank's forward and input backward passes. Each stage runs its own in the order of the microbatches."""

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._actions: list[Action] = []
        self._next: dict[tuple[Kind, int], int] = {}

    def add(self, times: int, *steps: tuple[Kind, int]) -> None:
        """Add the next microbatch of each step (kind, chunk) in turn, `times` times. Skip steps that have ended."""
        for step in steps * times:
            index = self._next.get(step, 0)
            if index < self._microbatches:
                self._actions.append(Action(index, step[1], step[0]))
                self._next[step] = index + 1

    def ended(self, kind: Kind, chunk: int) -> bool:
        return self._next.get((kind, chunk), 0) == self._microbatches

    def finish(self, *steps: tuple[Kind, int]) -> tuple[Action, ...]:
        """Add the steps in turn until none has microbatches left; return the whole order."""
        while not all(self.ended(*step) for step in steps):
            self.add(1, *steps)
        return tuple(self._actions)


def _fill(schedule: Schedule, limit: int) -> Schedule:
    """Add weight backward passes where a rank waits, and where it holds `limit` activations."""
    orders: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    waiting = [deque[Action]() for _ in range(schedule.ranks)]
    at, live = [0] * schedule.ranks, [0] * schedule.ranks
    # When each stage ends each of its passes.
    ended = {
        (kind, stage): [inf] * schedule.microbatches for kind in (Kind.F, Kind.B) for stage in range(schedule.stages)
    }
    passes = [_passes(schedule, rank, ended) for rank in range(schedule.ranks)]
    now, left = 0, sum(map(len, schedule.actions)) * 3 // 2
    forward, backward, of_weights = Kind
    while left:
        # The body runs for each action of each rank.
        for rank, order in enumerate(schedule.actions):
            action = order[at[rank]] if at[rank] < len(order) else None
            if action is not None and action.kind is forward and live[rank] == limit:
                action = None
            if action is not None:
                microbatch, chunk, kind = action
                ends, awaited = passes[rank][chunk, kind]
                for times in awaited:
                    if times[microbatch] > now:
                        action = None
                        break
            if action is not None:
                at[rank] += 1
                ends[microbatch] = now + 1
                if kind is forward:
                    live[rank] += 1
                elif kind is backward:
                    waiting[rank].append(Action(microbatch, chunk, of_weights))
            elif waiting[rank]:
                action = waiting[rank].popleft()
                live[rank] -= 1
            else:
                continue
            orders[rank].append(action)
            left -= 1
        now += 1
    return Schedule(
        ranks=schedule.ranks,
        chunks=schedule.chunks,
        microbatches=schedule.microbatches,
        actions=tuple(map(tuple, orders)),
        folded=schedule.folded,
        splits_backward=True,
    )


def _passes(
    schedule: Schedule, rank: int, ended: Mapping[tuple[Kind, int], list[float]]
) -> dict[tuple[int, Kind], tuple[list[float], list[list[float]]]]:
    """Return the entry of `ended` of each computation of a rank, and those that it waits for, by its chunk and its
    kind."""
    found = {}
    for chunk in range(schedule.chunks):
        stage = schedule.stage(rank, chunk)
        for kind in (Kind.F, Kind.B):
            awaited = [ended[kind, stage] for kind, stage in needs(schedule.stages, stage, kind)]
            found[chunk, kind] = (ended[kind, stage], awaited)
    return found
