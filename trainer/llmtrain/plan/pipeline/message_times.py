"""Durations of a pipeline's messages over the links of a cluster description. Without torch."""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.tiers import link
from llmtrain.cluster.topology import clusters_of, node_of
from llmtrain.plan.pipeline.actions import Schedule


@dataclass(frozen=True)
class MessageTimes:
    """Times of each hop from a stage to the next, as `Durations` takes them. transfer: seconds for which a message
    occupies the link. latency: seconds. links: what the two ranks send over. unknown: whether the description lacks a
    bandwidth."""

    transfer: tuple[float, ...]
    latency: tuple[float, ...]
    links: tuple[tuple[Hashable, Hashable], ...]
    unknown: bool


def message_times(cluster: Cluster | None, layout: Layout, stages: Schedule, message: float) -> MessageTimes:
    """Return the times of a pipeline's hops. Links that the description does not state take no time. message: bytes of
    one message.

    A rank sends to the stages before and after its own over the same card, unless one of them is in the same node or
    in another cluster. All ranks of a node that send to other nodes share the node's card. Of all replicas and
    tensor-parallel ranks, the slowest one counts.
    """
    ends = [
        (stages.rank_and_chunk(stage)[0], stages.rank_and_chunk(stage + 1)[0]) for stage in range(stages.stages - 1)
    ]
    groups = layout.groups(Axis.PIPELINE)
    sends = [
        [one for group in groups for one in ((group[here], group[there]), (group[there], group[here])) if here != there]
        for here, there in ends
    ]
    senders: dict[Hashable, set[int]] = defaultdict(set)
    for one, other in (pair for hop in sends for pair in hop):
        senders[node_of(cluster, one) if cluster else 0, _medium(cluster, one, other)].add(one)
    transfer, latency, unknown = [], [], False
    for hop in sends:
        seconds, late = [0.0], [0.0]
        for one, other in hop:
            bandwidth, waits = (None, None) if cluster is None else link(cluster, one, other)
            medium = _medium(cluster, one, other)
            sharing = 1 if cluster is None or medium == "node" else len(senders[node_of(cluster, one), medium])
            unknown = unknown or bandwidth is None
            seconds.append(sharing * message / bandwidth if bandwidth else 0.0)
            late.append(waits or 0.0)
        transfer.append(max(seconds))
        latency.append(max(late))
    first = groups[0]
    links = [
        ((here, _medium(cluster, first[here], first[there])), (there, _medium(cluster, first[there], first[here])))
        for here, there in ends
    ]
    return MessageTimes(tuple(transfer), tuple(latency), tuple(links), unknown)


def _medium(cluster: Cluster | None, one: int, other: int) -> str:
    """Return the medium between two ranks: the node, their cluster's cards, or the network between clusters."""
    if cluster is None or node_of(cluster, one) == node_of(cluster, other):
        return "node"
    return "between" if cluster.between is not None and len(clusters_of(cluster, (one, other))) > 1 else "cards"
