"""The recipe's `parallel` section."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from llmtrain_data.bounds import PositiveRanks


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The degrees of parallelism.

    tensor: ranks that split every layer's matrices. pipeline: ranks that split the layers. data: replicas that split
    the batch (auto: as many as the ranks allow). sequence: whether the ranks of `tensor` split the rest of a layer
    along the sequence (Korthikanti et al. 2022, section 4.2.2). order: axes of the grid of ranks, the slowest-varying
    first; pipeline-data-tensor keeps replicas inside a cluster (Holmes, section 3).
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    tensor: PositiveRanks = 1
    pipeline: PositiveRanks = 1
    data: PositiveRanks | Literal["auto"] = "auto"
    sequence: bool = False
    order: Literal["pipeline-data-tensor", "data-pipeline-tensor"] = "pipeline-data-tensor"
