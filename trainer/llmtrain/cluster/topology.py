"""Which ranks of a grid share a node or a cluster, and the speeds of its stages. No torch in here.

Tensor groups belong inside a node and data groups inside a cluster; pipeline stages may be in different clusters,
because they exchange the least (Holmes, section 3.2, equations 1, 3 and 4).
"""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import Final

from llmtrain_data.bounds import MAX_RANKS

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.parallel import ParallelConfig
from llmtrain.errors import BadInputError
from llmtrain.yaml.shown import shown

# The axes from the slowest-varying to the fastest-varying.
HOLMES: Final = "pipeline-data-tensor"


def layout_degrees(parallel: ParallelConfig, world: int) -> dict[Axis, int]:
    """Return the number of ranks along each axis, in the order of `parallel.order`.

    Raises BadInputError if `world` is not tensor x pipeline x data, or is too large.
    """
    check_world(world)
    model = parallel.tensor * parallel.pipeline
    data = world // model if parallel.data == "auto" else parallel.data
    if data < 1 or model * data != world:
        parts = f"parallel.tensor ({parallel.tensor}) times parallel.pipeline ({parallel.pipeline})"
        said = f"{parts} is {model}"
        if parallel.data != "auto":
            said = f"parallel.data is {data}" + (f", times {parts}" if model > 1 else "")
        number = model if parallel.data == "auto" else model * data
        multiple = "a multiple of " if parallel.data == "auto" else ""
        needed = f"start it with {multiple}{number} ranks (without a launcher: --nproc {number})"
        # auto helps only if tensor x pipeline divides the ranks.
        if parallel.data != "auto" and world % model == 0:
            needed = "set parallel.data=auto"
        raise BadInputError(f"{said}, but the run has {world} rank{'s' if world > 1 else ''}; {needed}")
    degree = {Axis.TENSOR: parallel.tensor, Axis.PIPELINE: parallel.pipeline, Axis.DATA: data}
    return {Axis(name): degree[Axis(name)] for name in parallel.order.split("-")}


def check_world(world: int) -> None:
    """Raise BadInputError for too many ranks, before anything is allocated per rank."""
    if world > MAX_RANKS:
        raise BadInputError(f"the run has {shown(world)} ranks; expected at most {MAX_RANKS:,}")


def node_of(cluster: Cluster, rank: int) -> int:
    """Return the number of the node that `rank` is on."""
    return rank // cluster.node.ranks


def cluster_of(cluster: Cluster, rank: int) -> int:
    """Return the index in `cluster.clusters` of the group with `rank`; 0 if there is at most one group."""
    ends = list(accumulate(group.nodes or 0 for group in cluster.clusters[:-1]))
    return bisect_right(ends, node_of(cluster, rank))


def nodes_of(cluster: Cluster, ranks: Iterable[int]) -> list[int]:
    """Return the nodes that `ranks` are on, in order."""
    return sorted({node_of(cluster, rank) for rank in ranks})


def clusters_of(cluster: Cluster, ranks: Iterable[int]) -> list[int]:
    """Return the clusters that `ranks` are in, in order."""
    return sorted({cluster_of(cluster, rank) for rank in ranks})


def stage_speeds(cluster: Cluster | None, layout: Layout) -> list[float] | None:
    """Return the speed of each stage's slowest rank; None if no cluster has a speed."""
    if cluster is None or all(group.speed is None for group in cluster.clusters):
        return None
    speeds: dict[int, float] = {}
    for rank in range(layout.world):
        stage = layout.coordinate(rank, Axis.PIPELINE)
        speed = cluster.clusters[cluster_of(cluster, rank)].speed or 1.0
        speeds[stage] = min(speed, speeds.get(stage, speed))
    return [speeds[stage] for stage in sorted(speeds)]


def placement_advice(cluster: Cluster | None, layout: Layout) -> list[str]:
    """Return a sentence with advice for each axis whose groups cross slow links unnecessarily."""
    if cluster is None:
        return []
    found = (_tensor_advice(cluster, layout), _data_advice(cluster, layout))
    return [sentence for sentence in found if sentence is not None]


def _tensor_advice(cluster: Cluster, layout: Layout) -> str | None:
    tensor, ranks = layout.degree(Axis.TENSOR), cluster.node.ranks
    if all(len(nodes_of(cluster, group)) == 1 for group in layout.groups(Axis.TENSOR)):
        return None
    return (
        f"parallel.tensor is {tensor} and a node has {ranks} ranks, so every layer's sums cross between nodes; set "
        f"parallel.tensor to a divisor of {ranks} to keep them inside"
    )


def _data_advice(cluster: Cluster, layout: Layout) -> str | None:
    """Return advice if gradients cross the network between clusters."""
    crossed = next((names for group in layout.groups(Axis.DATA) if (names := _names(cluster, group))), None)
    if cluster.between is None or crossed is None:
        return None
    rate = f" at {cluster.between.bandwidth}" if cluster.between.bandwidth else ""
    return (
        f"data-parallel groups cross the clusters {' and '.join(crossed)}, so gradients go over the network between "
        f"them{rate}; {_remedy(cluster, layout)}"
    )


def _remedy(cluster: Cluster, layout: Layout) -> str:
    axes, tensor = (Axis.PIPELINE, Axis.DATA, Axis.TENSOR), layout.degree(Axis.TENSOR)
    blocks = layout.world // tensor

    def inside(pipeline: int) -> bool:
        other = Layout(dict(zip(axes, (pipeline, blocks // pipeline, tensor), strict=True)))
        return not any(_names(cluster, group) for group in other.groups(Axis.DATA))

    # Prefer the present number of stages. With one tensor group per stage, no data group crosses anything.
    counts = (layout.degree(Axis.PIPELINE), *range(1, blocks + 1))
    pipeline = next(stages for stages in counts if blocks % stages == 0 and inside(stages))
    keys = [f"parallel.pipeline to {pipeline}"] if pipeline != layout.degree(Axis.PIPELINE) else []
    if list(layout.degrees) != [axis for axis in axes if axis in layout.degrees]:
        keys.append(f"parallel.order to {HOLMES}")
    return f"set {' and '.join(keys)} to have each stage inside one cluster"


def _names(cluster: Cluster, ranks: Iterable[int]) -> list[str]:
    """Return the names of the clusters of `ranks`; empty if all are in one."""
    crossed = clusters_of(cluster, ranks)
    return [cluster.clusters[index].name for index in crossed] if len(crossed) > 1 else []
