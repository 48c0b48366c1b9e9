"""The recipe's `pipeline` section."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from llmtrain_data.bounds import BatchSize, Factor, Layers

ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved", "breadth-first", "zero-bubble", "zero-bubble-v", "message-driven"
]


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How the stages of `parallel.pipeline` work together.

    schedule: gpipe (Huang et al. 2019), 1f1b and interleaved (Narayanan et al. 2021), zero-bubble and zero-bubble-v
    (ZB-H1 and ZB-V; Qi et al. 2024), message-driven, which runs whatever has arrived (AxoNN, Algorithm 2), or
    breadth-first, in which all microbatches pass a stage before the rank's next one (Lamy-Poirier 2023). It works
    without a pipeline too: gathered or offloaded weights then come once for all microbatches. chunks: stages on each
    rank (auto: 2 with interleaved and zero-bubble-v, which need several; with breadth-first as many as a rank has
    layers, and at most 4 where there are several ranks; else 1). split: layers of each stage, in the order of the
    model; uniform: the same number in each; balanced: minimizes the time of the slowest stage, embedding and head
    included; auto: balanced by the speeds of the stages' ranks, which the cluster file gives, or the start measures
    (CPU ranks of one machine count as equally fast). alpha: how much more than its share a faster stage gets (Holmes,
    equation 2). transport: torch (torch.distributed) or mpi carries activations between stages. limit: microbatches in
    flight with message-driven; auto: the number of stages.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    schedule: ScheduleName = "1f1b"
    chunks: Layers | Literal["auto"] = "auto"
    split: Literal["uniform", "balanced", "auto"] | tuple[Layers, ...] = "auto"
    alpha: Factor = 1.0
    transport: Literal["torch", "mpi"] = "torch"
    limit: BatchSize | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if not self.split:
            raise ValueError("split is []; expected the layers of each stage")
