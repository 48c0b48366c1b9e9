"""What a plan depends on besides the recipe. No torch in here."""

from dataclasses import dataclass
from typing import Literal

from llmtrain_kernels.attention.choice import Kernel

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.parallel import ParallelConfig
from llmtrain.cluster.rank_topology import RankTopology
from llmtrain.model.config import GPTConfig

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The ranks of a run, and what the names in its recipe refer to.

    world: number of ranks. ranks_per_node: ranks that were started on each machine, None for all of them. device: what
    the ranks compute on. apex: whether NVIDIA's apex is installed. native: whether the C++ kernels for CPUs run here.
    triton: whether Triton is installed, as torch's GPU builds for Linux have it. bf16: whether the GPUs compute in bf16
    and torch's FlashAttention runs on them: NVIDIA's from compute capability 8.0 on, and AMD's. amd: whether they are
    AMD's. cluster: the description that the key `cluster` names, or `machine` where it is auto. machine: description of
    the only machine of a run on GPUs; None on CPUs, on several machines, and where it is not known. tokenizer:
    vocabulary size of `data.tokenizer`, None without one. hf: shape of the model in `model.hf`, None without one.
    speeds: measured speeds of the pipeline's ranks, None where they were not measured. attention: kernel that
    `train.attention: auto` takes: the quickest, or torch's before it is measured. compiled: what `train.compile: auto`
    takes: whether compiled blocks are faster, False before it is measured.
    """

    world: int
    device: Device
    ranks_per_node: int | None = None
    apex: bool = False
    native: bool = True
    triton: bool = True
    bf16: bool = True
    amd: bool = False
    cluster: Cluster | None = None
    machine: Cluster | None = None
    tokenizer: int | None = None
    hf: GPTConfig | None = None
    speeds: tuple[float, ...] | None = None
    attention: Kernel = "torch"
    compiled: bool = False

    @property
    def node_ranks(self) -> int:
        """The ranks of each machine; all ranks where nobody states it."""
        return self.ranks_per_node or self.world

    def topology(self, parallel: ParallelConfig) -> RankTopology:
        """Return where the ranks are. Raises BadInputError if they do not fit the cluster or the degrees."""
        return RankTopology.of(self.cluster, parallel, self.world, self.node_ranks)
