"""Process groups for the levels of a placement: a hop is one level as this rank takes part in it."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain.cluster.levels import Level, shard_range
from llmtrain.comm.collectives import Collectives
from llmtrain.comm.ranks import Ranks
from llmtrain.comm.stream import Stream, new_stream
from llmtrain.comm.subgroups import make_groups
from llmtrain.comm.workspace import Workspace
from llmtrain.plan.placement import Placement


@dataclass(frozen=True)
class Hop:
    """One collective of a gather or a reduction.

    span: ranks that this hop and all faster ones reach. tier: the slowest link that it crosses. collectives: of its
    ranks. stream: where it runs, so that one unit's slow hop runs beside another unit's fast hop. workspace: buffers
    for what runs there, one collective after another.
    """

    span: int
    tier: str
    collectives: Collectives
    stream: Stream
    workspace: Workspace

    @property
    def radix(self) -> int:
        """Number of ranks in the group."""
        return self.collectives.size

    @property
    def place(self) -> int:
        """Place of this rank's part in what the group holds together."""
        return self.collectives.place


@dataclass(frozen=True, eq=False)
class Hops:
    """Every hop of this rank over the axes of a placement, the fastest first.

    place: of this rank along those axes. weights, gradients: what gathers and what reduces, over all levels. Each has
    groups of its own, as both are under way at the same time. flat: the weights' levels in one hop, where gathers are
    not hierarchical.
    """

    placement: Placement
    place: int = 0
    weights: tuple[Hop, ...] = ()
    gradients: tuple[Hop, ...] = ()
    flat: tuple[Hop, ...] = ()

    def close(self) -> None:
        """Leave the process groups."""
        for hop in (*self.weights, *self.gradients, *self.flat):
            hop.stream.close()
            hop.collectives.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the hops' buffers."""
        hops = (*self.weights, *self.gradients, *self.flat)
        return sum(hop.workspace.nbytes + hop.collectives.nbytes for hop in hops)

    def gather(self, inner: int, outer: int) -> tuple[Hop, ...]:
        """Return what gathers a state cut `outer` ways until it is cut `inner` ways."""
        if inner == 1 and self.flat and outer == self.flat[0].span:
            return self.flat
        return between(self.weights, inner, outer)

    def reduce(self, inner: int, outer: int) -> tuple[Hop, ...]:
        """Return what reduces gradients cut `inner` ways until they are cut `outer` ways."""
        return between(self.gradients, inner, outer)


def between(hops: Sequence[Hop], inner: int, outer: int) -> tuple[Hop, ...]:
    """Return the hops that lead from a state cut `inner` ways to one cut `outer` ways."""
    return tuple(hop for hop in hops if inner < hop.span <= outer)


def make_hops(ranks: Ranks, placement: Placement) -> Hops:
    """Make the process groups that a placement needs. Collective: every rank makes all of them in the same order."""
    lines, place = ranks.layout.groups(*placement.axes), ranks.layout.coordinate(ranks.rank, *placement.axes)
    degrees, levels = placement.degrees, placement.levels

    def hop(level: Level, order: Sequence[int], name: str) -> Hop:
        places = level.groups(degrees.ranks)
        groups = [[line[place] for place in group] for line in lines for group in places]
        workspace = Workspace(ranks.device)
        collectives = ranks.collectives(make_groups(ranks, groups), order, workspace)
        stream = new_stream(ranks.device, f"{name} over {level.tier}", ranks.activity)
        return Hop(level.span, level.tier, collectives, stream, workspace)

    # What is only reduced over a level is gathered back over it, too: every level is for both.
    weights = tuple(hop(level, range(level.radix), "gather") for level in levels)
    gradients = tuple(hop(level, range(level.radix), "reduce") for level in levels)
    if placement.hierarchical or degrees.weights == 1:
        return Hops(placement, place, weights, gradients)
    degree = degrees.weights
    one = Level(1, degree, next(level.tier for level in levels if level.span == degree))
    order = [shard_range(levels, place, degree, degree)[0] for place in range(degree)]
    return Hops(placement, place, weights, gradients, (hop(one, order, "gather"),))
