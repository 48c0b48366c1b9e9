"""What `bench comm` measures: the links of a cluster, and who speaks over each at once. Pure data, no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from llmtrain.cluster.description import Cluster, Nic
from llmtrain.cluster.nic import card_of

Groups = tuple[tuple[int, ...], ...]
# Which ranks speak: those on the card's own processor, or on each other's; or those on another.
Sockets = Literal["same", "cross"]


@dataclass(frozen=True)
class Link:
    """Links of one tier that are measured together.

    tier: its name in the node, `cluster`, or `all` for what is between clusters. groups: ranks that speak with each
    other; all groups do at the same time. cluster: which of the clusters, for the links of its nodes. card: which of
    their cards; None: all that the groups share out, as they do in training. sharing: how many ranks of a node use the
    card or cards. sockets: which processors the ranks are on beside the card's or each other's; None: any.
    """

    tier: str
    groups: Groups
    cluster: int | None = None
    card: int | None = None
    sharing: int = 1
    sockets: Sockets | None = None

    def nic(self, cluster: Cluster, rank: int) -> Nic | None:
        """Return the card that `rank` speaks through; None: whatever the backend takes by itself, or it has no part."""
        if self.cluster is None or self.card is None or not any(rank in group for group in self.groups):
            return card_of(cluster, self.groups, rank)
        return cluster.clusters[self.cluster].cards[self.card]


def links(cluster: Cluster, world: int, one_machine: bool, each_card: bool) -> list[Link]:
    """Return the links between `world` ranks, from the fastest.

    Inside a node all nodes speak at the same time, each rank to its neighbours across the tier: those that differ only
    in which of the next smaller tier's groups they are in. Ranks in the same place of a cluster's nodes speak to each
    other through each card in turn, and then through all; ranks in the same place of the clusters, through `between`.
    one_machine: whether all ranks are on one, whose cards have nothing to do. each_card: whether a group can be told
    which card to take.
    """
    found = list(_inside_nodes(cluster, world))
    if not one_machine:
        found += _through_cards(cluster, world, each_card)
        found += _between_clusters(cluster)
    return found


def socket_links(link: Link, sockets: Sequence[int], card_socket: int | None) -> list[Link]:
    """Return the parts of a link whose ranks are on the same processor as what they speak to, and on another one.

    sockets: the processor of each rank. card_socket: of the link's card; None where it is not known, and inside a node.
    There is none in a node of one processor, and for a card whose processor is not known.
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
    """Return the ranks of each of the clusters."""
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
            starts = [start + place for start in range(0, world, ranks) for place in range(smaller)]
            span = ranks - ranks % smaller
            yield Link(name, tuple(tuple(range(start, start - start % smaller + span, smaller)) for start in starts))
            smaller = ranks


def _through_cards(cluster: Cluster, world: int, each_card: bool) -> Iterator[Link]:
    local = cluster.node.ranks
    for index, ranks in enumerate(cluster_ranks(cluster, world)):
        if len(ranks) <= local:
            continue
        groups = tuple(tuple(ranks[place::local]) for place in range(local))
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
    groups = tuple(tuple(each[place] for each in ranks) for place in range(shared))
    yield Link("all", groups, sharing=local)


def _pairs(link: Link, sockets: Sequence[int], kind: Sockets) -> Link | None:
    """Return pairs of ranks of the link's groups that are on one processor, or on two."""
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
