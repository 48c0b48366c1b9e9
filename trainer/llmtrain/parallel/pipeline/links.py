"""How long a pipeline's messages take over the links that a cluster's description states. No torch in here."""

from collections.abc import Sequence

from llmtrain.cluster.config import Cluster
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.mesh import node_of
from llmtrain.cluster.tiers import link
from llmtrain.parallel.pipeline.actions import Schedule


def hop_times(
    cluster: Cluster | None, layout: Layout, stages: Schedule, message: float
) -> tuple[list[float], list[float]]:
    """Return for each hop from a stage to the next the seconds in which a message has the link, and its latency.

    All replicas and tensor-parallel ranks send at once, so that those of a node share what leaves it; of them the
    slowest counts. What the description does not state takes no time. message: bytes of what one rank sends.
    """
    transfer, latency = [], []
    for stage in range(stages.stages - 1):
        here, there = (stages.place(each)[0] for each in (stage, stage + 1))
        pairs = [(group[here], group[there]) for group in layout.groups(Axis.PIPELINE) if here != there]
        links = [] if cluster is None else [_link(cluster, pair, pairs) for pair in pairs]
        transfer.append(max((message * seconds for seconds, _ in links), default=0.0))
        latency.append(max((late for _, late in links), default=0.0))
    return transfer, latency


def _link(cluster: Cluster, pair: tuple[int, int], pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return the seconds per byte and the latency between two ranks, while all `pairs` send."""
    (bandwidth, latency), node, sharing = link(cluster, *pair), node_of(cluster, pair[0]), 1
    if node != node_of(cluster, pair[1]):
        sharing = sum(node_of(cluster, one) == node != node_of(cluster, other) for one, other in pairs)
    return sharing / bandwidth if bandwidth else 0.0, latency or 0.0
