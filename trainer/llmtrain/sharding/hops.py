"""Process groups for the levels of a placement: a hop is this rank's group of one level."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch.distributed as dist

from llmtrain.cluster.levels import Level
from llmtrain.cluster.tiers import tier_between
from llmtrain.comm.collectives import Collectives
from llmtrain.comm.ranks import Ranks
from llmtrain.comm.stream import Stream, new_stream
from llmtrain.comm.subgroups import make_groups
from llmtrain.comm.workspace import Workspace
from llmtrain.plan.collective_buffers import LANE_CTAS
from llmtrain.plan.placement import Placement
from llmtrain.plan.program.transfers import Lane
from llmtrain.plan.program.workspaces import LaneBuffers, flat_order, lanes_of


@dataclass(frozen=True)
class Hop:
    """One collective of a gather or a reduction.

    span: ranks that this hop and all faster ones reach. tier: the slowest link that it crosses. collectives: those of
    its group's ranks, which run one after another. stream: where it runs, so that one unit's slow hop runs in parallel
    with another unit's fast hop.
    """

    span: int
    tier: str
    collectives: Collectives
    stream: Stream

    @property
    def radix(self) -> int:
        """Number of ranks in the group."""
        return self.collectives.size

    @property
    def workspace(self) -> Workspace:
        """Buffers for what runs on the stream."""
        assert self.collectives.workspace is not None
        return self.collectives.workspace

    @property
    def position(self) -> int:
        """Position of this rank's part in the group's buffer."""
        return self.collectives.position


@dataclass(frozen=True, eq=False)
class Hops:
    """Every hop of this rank over the axes of a placement, the fastest first.

    data_rank: this rank along those axes. weights, gradients: the hops of gathers and of reductions, over all levels.
    Gathers and reductions run at the same time, so each have their own groups. flat: one hop over all levels of the
    weights, if gathers are not hierarchical. allocating: encloses the allocation of memory that they use.
    """

    placement: Placement
    data_rank: int = 0
    weights: tuple[Hop, ...] = ()
    gradients: tuple[Hop, ...] = ()
    flat: tuple[Hop, ...] = ()
    allocating: Callable[[], AbstractContextManager[None]] = nullcontext

    def close(self) -> None:
        """Leave the process groups."""
        for hop in self._all:
            hop.stream.close()
            hop.collectives.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the hops' buffers."""
        return sum(hop.collectives.nbytes for hop in self._all)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups of all hops."""
        return [hop.collectives.group for hop in self._all]

    @property
    def _all(self) -> tuple[Hop, ...]:
        return (*self.weights, *self.gradients, *self.flat)

    def gather(self, inner: int, outer: int) -> tuple[Hop, ...]:
        """Return the hops that gather a state from degree `outer` to degree `inner`."""
        if inner == 1 and self.flat and outer == self.flat[0].span:
            return self.flat
        return between(self.weights, inner, outer)

    def reduce(self, inner: int, outer: int) -> tuple[Hop, ...]:
        """Return the hops that reduce gradients from degree `inner` to degree `outer`."""
        return between(self.gradients, inner, outer)


def between(hops: Sequence[Hop], inner: int, outer: int) -> tuple[Hop, ...]:
    """Return the hops between degree `inner` and degree `outer`."""
    return tuple(hop for hop in hops if inner < hop.span <= outer)


def make_hops(ranks: Ranks, placement: Placement, lanes: LaneBuffers) -> Hops:
    """Make the process groups that a placement needs. lanes: what their collectives need. Collective: every rank makes
    all of them in the same order."""
    lines, data_rank = ranks.layout.groups(*placement.axes), ranks.layout.coordinate(ranks.rank, *placement.axes)

    def hop(lane: Lane, level: Level) -> Hop:
        flat = lane.kind == "flat"
        groups = [[line[rank] for rank in group] for line in lines for group in level.groups(placement.degrees.ranks)]
        order = flat_order(placement) if flat else range(level.radix)
        collectives = ranks.collectives(make_groups(ranks, groups, ctas=LANE_CTAS), lanes[lane], order)
        name = "gather" if flat else lane.kind
        # The level's tier is one along the axes, and the same for all groups.
        own = next(group for group in groups if ranks.rank in group)
        tier = tier_between(ranks.tiers, min(own), max(own))
        stream = new_stream(ranks.device, f"{name} over {tier}", ranks.activity)
        return Hop(level.span, tier, collectives, stream)

    # Sums that are reduced over a level are also gathered back over it, so every level has both kinds of hops.
    made = [(lane.kind, hop(lane, level)) for lane, level in lanes_of(placement)]
    weights, gradients, flat = (
        tuple(one for kind, one in made if kind == each) for each in ("gather", "reduce", "flat")
    )
    return Hops(placement, data_rank, weights, gradients, flat)
