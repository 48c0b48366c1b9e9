"""Whether a step of all ranks ends. No torch in here.

Each rank runs its passes in order. A pass waits for its message, but not for its own sends. A use waits for the gather
of its unit, a drop for the gather that it frees, and a reduction for those whose buffers are in the place of its own.
Tensor-parallel ranks compute together. In message-driven order, a rank runs a pass whose message has arrived.

A wait that is over stays over, so that where a step gets stuck does not depend on which rank runs first. Ranks that
are equal along an axis therefore get stuck at the same place, and one is followed for all of them.
"""

from collections.abc import Iterator

from llmtrain.cluster.layout import Axis
from llmtrain.plan.validation.grid import RankPrograms
from llmtrain.plan.validation.rank_run import RankRun
from llmtrain.plan.validation.world import ProgramWait, World


def deadlock_problems(ranks: RankPrograms) -> list[str]:
    """Return where each rank is stuck, and messages that arrive in the wrong order; empty if a step ends.

    In message-driven order, ranks are followed twice: they prefer backward passes, as they do at run time, and then
    forward passes.
    """
    found: list[str] = []
    driven = ranks.plan.pipeline.schedule.message_driven and ranks.groups is None
    orders = (True, False) if driven else (True,)
    for backward_first in orders:
        found += _follow(World(ranks=ranks, symmetric_axes=_symmetric_axes(ranks), backward_first=backward_first))
    return list(dict.fromkeys(found))


def _follow(world: World) -> list[str]:
    grid = world.ranks.plan.grid
    followed = [
        rank for rank in world.ranks.programs if not any(grid.coordinate(rank, axis) for axis in world.symmetric_axes)
    ]
    runs = {rank: RankRun(world, rank).run() for rank in followed}
    waits: dict[int, ProgramWait] = {}
    moved = True
    while moved:
        moved = False
        for rank in list(runs):
            if rank in waits and not waits[rank].ready():
                continue
            moved = True
            wait = _next_wait(runs[rank])
            if wait is None:
                del runs[rank]
                waits.pop(rank, None)
            else:
                waits[rank] = wait
    stuck = [f"rank {rank}, {wait.place}: it waits forever for {wait.what()}" for rank, wait in waits.items()]
    return [*world.problems, *stuck]


def _next_wait(run: Iterator[ProgramWait]) -> ProgramWait | None:
    """Let a rank run as far as it can; return what it waits for, None at its end."""
    return next((wait for wait in run if not wait.ready()), None)


def _symmetric_axes(ranks: RankPrograms) -> frozenset[Axis]:
    """Return the axes along which ranks have the same programs and units of the same sizes."""
    plan, found = ranks.plan, []
    only_data = all(placement.axes == (Axis.DATA,) for placement in plan.sharding.placements.values())
    for axis in (Axis.DATA, Axis.TENSOR):
        lines = plan.grid.groups(axis)
        equal = all(
            ranks.programs[rank] is ranks.programs[line[0]]
            and ranks.part(rank).spec.padded == ranks.part(line[0]).spec.padded
            for line in lines
            for rank in line
        )
        if equal and (axis is Axis.TENSOR or only_data):
            found.append(axis)
    return frozenset(found)
