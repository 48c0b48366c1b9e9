"""The links that `bench comm` measures, and the ranks that use each one at the same time. Pure data, no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from llmtrain.cluster.description import Cluster, Nic
from llmtrain.cluster.nic import card_of

RankGroups = tuple[tuple[int, ...], ...]
# same: ranks on the CPU socket of their card or of each other. cross: ranks on another socket.
Sockets = Literal["same", "cross"]


@dataclass(frozen=True)
class Link:
    """Links of one tier that are measured together.

    tier: its name in the node, `cluster` between nodes, or `all` between clusters. groups: ranks that communicate; all
    groups do so at the same time. cluster: index of the cluster, for the links of its nodes. card: index of the node's
    card; None: the groups share all cards, as in training. sharing: how many ranks of a node use the card or cards.
    sockets: the ranks' CPU sockets relative to the card or to each other; None: any.
    """

    tier: str
    groups: RankGroups
    cluster: int | None = None
    card: int | None = None
    sharing: int = 1
    sockets: Sockets | None = None

    def nic(self, cluster: Cluster, rank: int) -> Nic | None:
        """Return the card that `rank` uses; None: the backend chooses, or the rank takes no part."""
        if self.cluster is None or self.card is None or not any(rank in group for group in self.groups):
            return card_of(cluster, self.groups, rank)
        return cluster.clusters[self.cluster].cards[self.card]


def links(cluster: Cluster, world: int, one_machine: bool, each_card: bool) -> list[Link]:
    """Return the links between `world` ranks, from the fastest.

    For a tier inside the node, all nodes communicate at the same time. Each rank uses its neighbours across the tier:
    ranks that differ only in their group of the next smaller tier. Between nodes, ranks at the same place of a
    cluster's nodes use one card after the other, and then all cards. Between clusters, ranks at the same place of the
    clusters use `between`. one_machine: whether all ranks are on one machine, so that they use no card. each_card:
    whether the backend lets a group choose its card.
    """
    found = list(_inside_nodes(cluster, world))
    if not one_machine:
        found += _through_cards(cluster, world, each_card)
        found += _between_clusters(cluster)
    return found


def socket_links(link: Link, sockets: Sequence[int], card_socket: int | None) -> list[Link]:
    """Return the parts of a link whose ranks are on the same CPU socket as their peer or card, and on another one.

    sockets: each rank's CPU socket. card_socket: CPU socket of the link's card; None if unknown, and inside a node. The
    result is empty for nodes with one socket, and for a card whose socket is unknown.
    """
    if len(set(sockets)) < 2:
        return []
    if link.cluster is None and link.tier != "all":
        return [part for kind in ("same", "cross") if (part := _pairs(link, sockets, kind))]
    if card_socket is None:
        return []
    parts = []
    for kind in ("same", "cross"):
        chosen = tuple(
            group for group in link.groups if all((sockets[rank] == card_socket) == (kind == "same") for rank in group)
        )
        if chosen:
            sharing = max(1, link.sharing * len(chosen) // len(link.groups))
            parts.append(replace(link, groups=chosen, sharing=sharing, sockets=kind))
    return parts


def cluster_ranks(cluster: Cluster, world: int) -> list[range]:
    """Return the ranks of each cluster."""
    groups, local, found = cluster.clusters, cluster.node.ranks, list[range]()
    for group in groups:
        first = found[-1].stop if found else 0
        last = world if len(groups) == 1 else first + (group.nodes or 0) * local
        found.append(range(first, last))
    return found


def _inside_nodes(cluster: Cluster, world: int) -> Iterator[Link]:
    local, smaller = min(cluster.node.ranks, world), 1
    tiers = [(tier.name, min(tier.ranks, local)) for tier in cluster.node.tiers]
    if "node" not in dict(tiers):
        tiers.append(("node", local))
    for name, ranks in tiers:
        if ranks > smaller:
            starts = [start + offset for start in range(0, world, ranks) for offset in range(smaller)]
            span = ranks - ranks % smaller
            yield Link(name, tuple(tuple(range(start, start - start % smaller + span, smaller)) for start in starts))
            smaller = ranks


def _through_cards(cluster: Cluster, world: int, each_card: bool) -> Iterator[Link]:
    local = cluster.node.ranks
    for index, ranks in enumerate(cluster_ranks(cluster, world)):
        if len(ranks) <= local:
            continue
        groups = tuple(tuple(ranks[local_rank::local]) for local_rank in range(local))
        cards = range(len(cluster.clusters[index].cards))
        if each_card:
            yield from (Link("cluster", groups, index, card, local) for card in cards)
        if len(cards) != 1 or not each_card:
            yield Link("cluster", groups, index, None, local)


def _between_clusters(cluster: Cluster) -> Iterator[Link]:
    if len(cluster.clusters) < 2:
        return
    local, ranks = cluster.node.ranks, cluster_ranks(cluster, 0)
    shared = min(len(each) for each in ranks)
    groups = tuple(tuple(each[index] for each in ranks) for index in range(shared))
    yield Link("all", groups, sharing=local)


def _pairs(link: Link, sockets: Sequence[int], kind: Sockets) -> Link | None:
    """Return pairs of ranks of the link's groups on one CPU socket, or on two; None if there are none."""
    pairs = []
    for group in link.groups:
        by_socket = [
            list(ranks) for _, ranks in groupby(sorted(group, key=lambda rank: sockets[rank]), sockets.__getitem__)
        ]
        if kind == "same":
            pairs += [pair for ranks in by_socket for pair in zip(ranks[::2], ranks[1::2], strict=False)]
        elif len(by_socket) > 1:
            pairs += list(zip(by_socket[0], by_socket[1], strict=False))
    return replace(link, groups=tuple(pairs), sockets=kind) if pairs else None
