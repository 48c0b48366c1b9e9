"""Where the ranks of a run are: on which cluster, between which links, and in which grid. No torch in here."""

from dataclasses import dataclass

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.layout import Layout
from llmtrain.cluster.parallel import ParallelConfig
from llmtrain.cluster.tiers import Tier, tiers
from llmtrain.cluster.topology import layout_degrees


@dataclass(frozen=True)
class RankTopology:
    """Where the ranks of a run are. cluster: the description, None without one. tiers: tiers of links between all
    ranks, fastest first. grid: the grid of ranks."""

    cluster: Cluster | None
    tiers: tuple[Tier, ...]
    grid: Layout

    @classmethod
    def of(cls, cluster: Cluster | None, parallel: ParallelConfig, world: int, ranks_per_node: int) -> "RankTopology":
        """Return that of `world` ranks. ranks_per_node: started on each machine. Raises BadInputError if the ranks do
        not fit the cluster or the degrees."""
        grid = Layout(layout_degrees(parallel, world))
        return cls(cluster, tiers(cluster, world, ranks_per_node), grid)
