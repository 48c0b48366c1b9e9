"""Which network card a process group speaks through, from where its ranks are (Holmes, section 3.3). Pure data."""

from bisect import bisect_left
from collections.abc import Sequence

from llmtrain.cluster.description import Cluster, Nic
from llmtrain.cluster.topology import cluster_of, clusters_of, node_of, nodes_of

# What NCCL calls the networks that cards of a kind are used through. Of others it knows best itself.
_NCCL_NETS = {"infiniband": "IB", "roce": "IB"}


def card_of(cluster: Cluster | None, groups: Sequence[Sequence[int]], rank: int) -> Nic | None:
    """Return the card of `rank` for the one of `groups` that it is in; None: whatever the backend takes by itself.

    groups: all that are made together and used at the same time. Inside a node there is no card; inside a cluster
    the groups that leave a node share out its cards; across clusters it is the network between them, or where they
    have none, being on the same, the rank's own card.
    """
    index = next((index for index, group in enumerate(groups) if rank in group), None)
    if cluster is None or index is None:
        return None
    return _card(cluster, groups[index], rank, index, _leaving(cluster, groups))


def cards_of(cluster: Cluster | None, groups: Sequence[Sequence[int]]) -> list[Nic | None]:
    """Return for each group what `card_of` says of its first rank, in time that grows with the ranks alone."""
    if cluster is None:
        return [None] * len(groups)
    leaving = _leaving(cluster, groups)
    return [_card(cluster, group, group[0], index, leaving) for index, group in enumerate(groups)]


def _leaving(cluster: Cluster, groups: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Return, by node, the indices of the groups that have ranks on it and others elsewhere."""
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
    # Seen from the first rank's node, so that all members take the card in the same place.
    sharing = leaving[node_of(cluster, own[0])]
    return cards[bisect_left(sharing, index) * len(cards) // len(sharing)] if cards else None


def nccl_net(cluster: Cluster | None, card: Nic | None) -> str | None:
    """Return the network for NCCL to use for a group that speaks through `card`; None: whatever it takes by itself."""
    if cluster is None or card is None:
        return None
    # Automatic choice would take the fast cards, which are there on both sides and do not reach each other.
    return _NCCL_NETS.get(card.kind, "Socket" if card is cluster.between else None)
