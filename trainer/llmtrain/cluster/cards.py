"""Which network card a process group speaks through, from where its ranks are (Holmes, section 3.3). Pure data."""

from collections.abc import Sequence

from llmtrain.cluster.config import Cluster, Nic
from llmtrain.cluster.mesh import cluster_of, clusters_of, node_of, nodes_of

# What NCCL calls the networks that cards of a kind are used through. Of others it knows best itself.
_NCCL_NETS = {"infiniband": "IB", "roce": "IB"}


def card_of(cluster: Cluster | None, groups: Sequence[Sequence[int]], rank: int) -> Nic | None:
    """Return the card of `rank` for the one of `groups` that it is in; None: whatever the backend takes by itself.

    groups: all that are made together and used at the same time. Inside a node there is no card; inside a cluster
    the groups that leave a node share out its cards; across clusters it is the network between them, or where they
    have none, being on the same, the rank's own card.
    """
    own = next((group for group in groups if rank in group), None)
    if cluster is None or own is None or len(nodes_of(cluster, own)) == 1:
        return None
    if len(clusters_of(cluster, own)) > 1 and cluster.between is not None:
        return cluster.between
    cards = cluster.clusters[cluster_of(cluster, rank)].cards if cluster.clusters else ()
    # Seen from the first rank's node, so that all members take the card in the same place.
    sharing = [group for group in groups if _leaves(cluster, group, node_of(cluster, own[0]))]
    return cards[sharing.index(own) * len(cards) // len(sharing)] if cards else None


def nccl_net(cluster: Cluster | None, card: Nic | None) -> str | None:
    """Return the network for NCCL to use for a group that speaks through `card`; None: whatever it takes by itself."""
    if cluster is None or card is None:
        return None
    # Automatic choice would take the fast cards, which are there on both sides and do not reach each other.
    return _NCCL_NETS.get(card.kind, "Socket" if card is cluster.between else None)


def _leaves(cluster: Cluster, group: Sequence[int], node: int) -> bool:
    """Whether a group has ranks on a node, and others elsewhere."""
    nodes = nodes_of(cluster, group)
    return node in nodes and len(nodes) > 1
