"""Process groups for the levels of the data axis: a hop is one level as this rank takes part in it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.levels import Degrees, Level, shard_range
from llmtrain.comm.ranks import Ranks
from llmtrain.comm.shared_memory import SharedSlots, share_slots
from llmtrain.comm.subgroups import make_groups
from llmtrain.sharding.stream import Stream, new_stream
from llmtrain.sharding.workspace import Workspace


@dataclass(frozen=True)
class Hop:
    """One collective of a gather or a reduction.

    span: ranks that it and all faster hops reach. order: for each member of the group the place of its part in what the
    group holds together. tier: the slowest link it crosses. stream: where it runs, so that one unit's slow hop runs
    beside another's fast one. workspace: buffers for what runs there. slots: memory that the group's processes share,
    where they can.
    """

    span: int
    order: tuple[int, ...]
    tier: str
    group: dist.ProcessGroup
    stream: Stream
    workspace: Workspace
    slots: SharedSlots | None = None

    @property
    def radix(self) -> int:
        """Members of the group."""
        return len(self.order)

    @property
    def place(self) -> int:
        """Place of this rank's part."""
        return self.order[self.group.rank()]

    def exchange(self, received: Tensor, sent: Tensor) -> None:
        """Give part k of `sent` to member k, and put what it gives into part k of `received`."""
        if self.slots is not None:
            self.slots.exchange(received, sent)
        else:
            dist.all_to_all_single(received, sent, group=self.group)


@dataclass(frozen=True)
class Hops:
    """Every hop of this rank, the fastest first.

    weights, gradients: what gathers and what reduces, over all levels. Each has groups of its own, as both are under
    way at the same time. flat: the weights' levels in one hop, where gathers are not hierarchical.
    """

    weights: tuple[Hop, ...] = ()
    gradients: tuple[Hop, ...] = ()
    flat: tuple[Hop, ...] = ()

    def close(self) -> None:
        """Leave the process groups."""
        for hop in (*self.weights, *self.gradients, *self.flat):
            hop.stream.close()
            dist.destroy_process_group(hop.group)

    @property
    def nbytes(self) -> int:
        """Bytes of the hops' buffers."""
        hops = (*self.weights, *self.gradients, *self.flat)
        return sum(hop.workspace.nbytes + (hop.slots.nbytes if hop.slots else 0) for hop in hops)

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


def make_hops(ranks: Ranks, degrees: Degrees, levels: Sequence[Level], hierarchical: bool) -> Hops:
    """Make the process groups that `degrees` need. Collective: every rank makes all of them in the same order."""
    axes = ranks.layout.groups(Axis.DATA)

    def hop(level: Level, order: Sequence[int], name: str) -> Hop:
        places = level.groups(ranks.layout.degrees[Axis.DATA])
        groups = [[axis[place] for place in group] for axis in axes for group in places]
        group = make_groups(ranks, groups)
        stream = new_stream(ranks.device, f"{name} over {level.tier}", ranks.activity)
        slots = share_slots(group) if _in_a_node(ranks, group) else None
        return Hop(level.span, tuple(order), level.tier, group, stream, Workspace(ranks.device), slots)

    # What is only reduced over a level is gathered back over it, too: every level is for both.
    weights = tuple(hop(level, range(level.radix), "gather") for level in levels)
    gradients = tuple(hop(level, range(level.radix), "reduce") for level in levels)
    if hierarchical or degrees.weights == 1:
        return Hops(weights, gradients)
    degree = degrees.weights
    one = Level(1, degree, next(level.tier for level in levels if level.span == degree))
    order = [shard_range(levels, place, degree, degree)[0] for place in range(degree)]
    return Hops(weights, gradients, (hop(one, order, "gather"),))


def _in_a_node(ranks: Ranks, group: dist.ProcessGroup) -> bool:
    """Return whether the group's ranks compute on the CPUs of one node."""
    node = next((tier.ranks for tier in ranks.tiers if "node" in (tier.name, *tier.aliases)), 1)
    nodes = {rank // node for rank in dist.get_process_group_ranks(group)}
    return ranks.device.type == "cpu" and len(nodes) == 1
