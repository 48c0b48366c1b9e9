"""The recipe's `parallel` section."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from llmtrain_data.bounds import Ranks


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the ranks share the work.

    tensor: ranks that share every layer's matrices. pipeline: stages that each hold some of the layers. data: replicas
    that each take a share of the batch (auto: as many as there are ranks for). sequence: whether the ranks of `tensor`
    share the rest of a layer along the sequence (Korthikanti et al. 2022, section 4.2.2). order: which ranks are
    neighbours, from the axis whose are furthest apart; the first keeps replicas inside a cluster (Holmes, section 3).
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    tensor: Ranks = 1
    pipeline: Ranks = 1
    data: Ranks | Literal["auto"] = "auto"
    sequence: bool = False
    order: Literal["pipeline-data-tensor", "data-pipeline-tensor"] = "pipeline-data-tensor"
