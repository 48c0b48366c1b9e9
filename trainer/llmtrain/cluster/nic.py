"""Which network card a process group uses, from where its ranks are (Holmes, section 3.3). No torch in here."""

from bisect import bisect_left
from collections.abc import Sequence

from llmtrain.cluster.description import Cluster, Nic
from llmtrain.cluster.topology import cluster_of, clusters_of, node_of, nodes_of

# NCCL's names for the networks of these kinds of cards. For other kinds, NCCL chooses.
_NCCL_NETS = {"infiniband": "IB", "roce": "IB"}


def card_of(cluster: Cluster | None, groups: Sequence[Sequence[int]], rank: int) -> Nic | None:
    """Return the card that `rank` uses in the one of `groups` that has it; None: the backend chooses.

    groups: all groups that are made together and used at the same time. A group inside one node uses no card. The
    groups of one cluster that span nodes are spread over the cards of each node. A group across clusters uses the
    network between them, or the rank's own card if the clusters are on one network.
    """
    index = next((index for index, group in enumerate(groups) if rank in group), None)
    if cluster is None or index is None:
        return None
    return _card(cluster, groups[index], rank, index, _leaving(cluster, groups))


def cards_of(cluster: Cluster | None, groups: Sequence[Sequence[int]]) -> list[Nic | None]:
    """Return `card_of` of each group's first rank, in time linear in the number of ranks."""
    if cluster is None:
        return [None] * len(groups)
    leaving = _leaving(cluster, groups)
    return [_card(cluster, group, group[0], index, leaving) for index, group in enumerate(groups)]


def _leaving(cluster: Cluster, groups: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Return for each node the indices of the groups with ranks on it and on other nodes."""
    found: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        nodes = nodes_of(cluster, group)
        for node in nodes if len(nodes) > 1 else []:
            found.setdefault(node, []).append(index)
    return found


def _card(cluster: Cluster, own: Sequence[int], rank: int, index: int, leaving: dict[int, list[int]]) -> Nic | None:
    if len(nodes_of(cluster, own)) == 1:
        return None
    if len(clusters_of(cluster, own)) > 1 and cluster.between is not None:
        return cluster.between
    cards = cluster.clusters[cluster_of(cluster, rank)].cards if cluster.clusters else ()
    # All members take the group's place on the first rank's node, so that they use the card with the same index.
    sharing = leaving[node_of(cluster, own[0])]
    return cards[bisect_left(sharing, index) * len(cards) // len(sharing)] if cards else None


def nccl_net(cluster: Cluster | None, card: Nic | None) -> str | None:
    """Return the network that NCCL is to use for a group with this card; None: NCCL chooses."""
    if cluster is None or card is None:
        return None
    if card is not cluster.between:
        return _NCCL_NETS.get(card.kind)
    # NCCL would choose the fast cards, which both sides have, but which cannot reach each other. Where they can, they
    # are of the kind of the network between the clusters.
    joined = all(other.kind == card.kind for group in cluster.clusters for other in group.cards)
    return _NCCL_NETS.get(card.kind, "Socket") if joined else "Socket"
