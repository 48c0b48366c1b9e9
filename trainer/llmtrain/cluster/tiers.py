"""The tiers of links between the ranks of a run, fastest first. No torch in here."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd
from typing import Literal

from llmtrain.cluster.description import Cluster, Nic, NodeGroup, NodeTier
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.quantity import quantity
from llmtrain.cluster.topology import cluster_of, clusters_of, node_of
from llmtrain.errors import BadInputError

# Bandwidth in bytes per second and latency in seconds; None if unknown.
Figures = tuple[float | None, float | None]


@dataclass(frozen=True)
class Tier:
    """Aligned groups of `ranks` consecutive ranks, between which links are at least this fast.

    bandwidth: bytes per second in one direction of what `per` says; None if unknown.
    latency: seconds of one message; None if unknown. aliases: names of smaller tiers with the same number of ranks.
    sizes: the ranks of each group of the tier, in order, if they differ; empty if each group has `ranks`. The aligned
    groups are parts of those groups.
    """

    name: str
    ranks: int
    bandwidth: float | None = None
    latency: float | None = None
    aliases: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def per(self) -> Literal["rank", "node"]:
        """Of what the bandwidth is: inside a node, of each rank; between nodes, of the cards that a node's ranks
        share."""
        # The figures are those of the smallest tier that was merged.
        return "node" if (*self.aliases, self.name)[0] in ("cluster", "all") else "rank"

    def group(self, rank: int) -> int:
        """Return the number of the tier's group that `rank` is in."""
        return bisect_right(self._ends, rank) if self.sizes else rank // self.ranks

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.sizes))


def tiers(cluster: Cluster | None, world: int, ranks_per_node: int) -> tuple[Tier, ...]:
    """Return the tiers of a run of `world` ranks, fastest first: those inside the node, node, cluster, all.

    cluster: None for a run without a description, which was started with `ranks_per_node` ranks on each machine. A
    node of a description may be part of a machine, but never spans several. Tiers with the same number of ranks are
    merged, with the name of the larger and the figures of the faster one: in a single node, that is `all`. For clusters
    of different sizes, `ranks` of the tier `cluster` is the greatest common divisor of their ranks, and it is merged
    with no other. Raises BadInputError if `world` does not fit.
    """
    if cluster is None:
        described = [Tier("node", gcd(ranks_per_node, world)), Tier("cluster", world), Tier("all", world)]
    else:
        _check_machines(cluster, world, ranks_per_node)
        _check_nodes(cluster, world)
        described = _described(cluster, world)
    # Tiers are smaller in a node that the run does not fill.
    found = _distinct([replace(tier, ranks=min(tier.ranks, world)) for tier in described])
    for smaller, larger in pairwise(found):
        if larger.ranks % smaller.ranks:
            change = "set cluster.node.ranks to the ranks of a machine, or " if smaller.name == "node" else ""
            raise BadInputError(
                f"the cluster's tier {smaller.name} has {smaller.ranks} ranks, but the run has {world}; {change}start "
                f"it with a multiple of {smaller.ranks}"
            )
    return found


def axis_tiers(tiers: Sequence[Tier], layout: Layout, *axes: Axis) -> tuple[Tier, ...]:
    """Return the tiers as the ranks along the product of `axes` see them: `ranks` counts neighbours along it.

    The new size of a tier is the largest divisor of the axis such that all aligned groups of that many neighbours are
    inside the tier; it is 1 if neighbours are further apart than the tier is wide, or if no larger group fits. Tiers of
    equal size are merged, and keep their names as aliases. Along the only axis of a layout, tiers of equally large
    groups do not change. Raises ValueError for axes that are not next to each other in the layout.
    """
    first = layout.group_of(0, *axes)
    stride = first[1] - first[0] if len(first) > 1 else 1
    if first != list(range(0, len(first) * stride, stride)):
        raise ValueError(f"{[axis.value for axis in axes]} are not next to each other in {layout}")
    # An aligned group of n neighbours spans n x stride ranks, and these spans tile the ranks without gaps. So all of
    # them are inside the tier exactly if the tier's size is a multiple of n x stride.
    sizes = [gcd(len(first), tier.ranks // stride) if tier.ranks % stride == 0 else 1 for tier in tiers]
    return _distinct([replace(tier, ranks=size, sizes=()) for tier, size in zip(tiers, sizes, strict=True)])


def tier_between(tiers: Sequence[Tier], one: int, other: int) -> str:
    """Return the name of the fastest tier that has both ranks in one of its groups."""
    return next(tier.name for tier in tiers if tier.group(one) == tier.group(other))


def node_ranks(tiers: Sequence[Tier]) -> int:
    """Return the ranks of a node; 1 if the tiers do not say it."""
    return next((tier.ranks for tier in tiers if "node" in (tier.name, *tier.aliases)), 1)


def link(cluster: Cluster, one: int, other: int) -> Figures:
    """Return the bandwidth and the latency between two ranks from a description: inside a node, those of the smallest
    tier with both; between nodes, those of the nodes' cards, which the ranks of a node share."""
    if node_of(cluster, one) == node_of(cluster, other):
        local_ranks = [rank % cluster.node.ranks for rank in (one, other)]
        near = (tier for tier in cluster.node.tiers if local_ranks[0] // tier.ranks == local_ranks[1] // tier.ranks)
        return next(map(_figures, near), (None, None))
    groups = [cluster.clusters[index] for index in clusters_of(cluster, (one, other))] if cluster.clusters else []
    if len(groups) > 1 and cluster.between is not None:
        return _figures(cluster.between)
    return _slowest([_through_all_cards(group) for group in groups])


def rate_from(cluster: Cluster, tier: Tier, rank: int) -> float | None:
    """Return the rate, in bytes per second, of the links of a tier from `rank`, or from its node; None if the
    description does not state it."""
    if tier.per == "rank":
        return tier.bandwidth
    if len(cluster.clusters) > 1 and tier.name == "all" and cluster.between is not None:
        return _figures(cluster.between)[0]
    return _through_all_cards(cluster.clusters[cluster_of(cluster, rank)])[0] if cluster.clusters else None


def tier_ranks(tiers: Sequence[Tier], name: str) -> int:
    """Return the ranks of the tier with this name or alias. Raises BadInputError if there is none."""
    for tier in tiers:
        if name in (tier.name, *tier.aliases):
            return tier.ranks
    names = [name for tier in tiers for name in (*tier.aliases, tier.name)]
    raise BadInputError(f"{name} is no tier of this cluster; expected one of {', '.join(names)}")


def _distinct(tiers: Sequence[Tier]) -> tuple[Tier, ...]:
    """Merge tiers with the same number of ranks: the name of the larger and the figures of the faster one."""
    found: list[Tier] = []
    for tier in tiers:
        if found and (found[-1].ranks, found[-1].sizes) == (tier.ranks, tier.sizes):
            faster = found.pop()
            found.append(replace(faster, name=tier.name, aliases=(*faster.aliases, faster.name, *tier.aliases)))
        else:
            found.append(tier)
    return tuple(found)


def _check_machines(cluster: Cluster, world: int, ranks_per_node: int) -> None:
    if world > ranks_per_node and ranks_per_node % cluster.node.ranks:
        raise BadInputError(
            f"cluster.node.ranks is {cluster.node.ranks}, but the run was started with {ranks_per_node} ranks on each "
            f"machine; start it with {cluster.node.ranks}, or set cluster.node.ranks to {ranks_per_node}"
        )


def _check_nodes(cluster: Cluster, world: int) -> None:
    counts = [group.nodes for group in cluster.clusters if group.nodes is not None]
    most = sum(counts) * cluster.node.ranks
    several = len(cluster.clusters) > 1
    if (several and world != most) or (counts and world > most):
        raise BadInputError(
            f"the cluster has {' + '.join(map(str, counts))} nodes of {cluster.node.ranks} ranks, but the run has "
            f"{world} ranks; start it with {'' if several else 'at most '}{most}"
        )


def _described(cluster: Cluster, world: int) -> list[Tier]:
    """Return the tiers for full nodes; some may have the same number of ranks."""
    inside = [Tier(tier.name, tier.ranks, *_figures(tier)) for tier in cluster.node.tiers]
    if not inside or inside[-1].name != "node":
        inside.append(Tier("node", cluster.node.ranks))
    own = _slowest([_through_all_cards(group) for group in cluster.clusters])
    if len(cluster.clusters) < 2:
        return [*inside, Tier("cluster", world, *own), Tier("all", world, *own)]
    ranks = tuple(group.nodes * cluster.node.ranks for group in cluster.clusters if group.nodes is not None)
    sizes = ranks if len(set(ranks)) > 1 else ()
    joined = own if cluster.between is None else _figures(cluster.between)
    return [*inside, Tier("cluster", gcd(*ranks), *own, sizes=sizes), Tier("all", world, *joined)]


def _through_all_cards(group: NodeGroup) -> Figures:
    """Return the figures of one node of a cluster, with all its cards used at the same time."""
    figures = [_figures(card) for card in group.cards]
    return _known([rate for rate, _ in figures], sum), _slowest(figures)[1]


def _slowest(figures: Sequence[Figures]) -> Figures:
    return _known([rate for rate, _ in figures], min), _known([latency for _, latency in figures], max)


def _known(values: Sequence[float | None], reduce: Callable[[list[float]], float]) -> float | None:
    """Reduce values; the result is unknown if any of them is."""
    known = [value for value in values if value is not None]
    return reduce(known) if known and len(known) == len(values) else None


def _figures(link: NodeTier | Nic) -> Figures:
    rate = None if link.bandwidth is None else quantity(link.bandwidth, "byte/s")
    return rate, None if link.latency is None else quantity(link.latency, "s")
