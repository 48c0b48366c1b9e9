"""The recipe: everything that a user can set for a run, as typed, frozen data."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from llmtrain_data.bounds import BatchSize, Layers, Seconds, Seed, Steps, StepsOrNever
from llmtrain_data.config import DataConfig
from llmtrain_kernels.attention.choice import Kernel

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.parallel import ParallelConfig
from llmtrain.model.config import ModelConfig
from llmtrain.optim.config import OptimizerConfig, PrecisionConfig, SpikeConfig
from llmtrain.recipe.checkpoint import CheckpointConfig
from llmtrain.recipe.logging import LoggingConfig
from llmtrain.recipe.offload import OffloadConfig
from llmtrain.recipe.pipeline import PipelineConfig
from llmtrain.recipe.zero import QuantizeConfig, ZeroConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long a run trains, and in which batches.

    steps: optimizer steps of the whole run. global_batch: sequences per optimizer step, over all ranks. microbatch:
    sequences that one rank computes at once (auto: the largest divisor of its share that fits accelerator.memory of the
    cluster; at most 8 where none is stated, and on CPUs; with a pipeline, one that leaves four microbatches for each
    stage). attention: kernel of attention on GPUs: torch, cudnn, flash-attn-2 or flash-attn-3 (auto: in 16 bits the
    quickest of those that are installed, as timed at the run's first start; recipe.resolved.yaml keeps it; CPUs have
    one of their own). eval_every: steps between evaluations (0: never). eval_batches: global batches per evaluation,
    fewer if the validation split is smaller. compile: let torch.compile build the blocks' kernels in place of those of
    llmtrain (auto: on GPUs where that is faster, as timed at the run's first start, without tensor and pipeline
    parallelism and without `deterministic`; recipe.resolved.yaml keeps it; not on CPUs). deterministic: take only
    kernels whose results have the same bits in every run on the same GPUs, which may be slower; on CPUs all have.
    max_skipped: skipped steps in a row that stop the run (overflows of fp16 that lower the loss scale do not count),
    and rewinds in a row that do. compare_every: steps between checks that replicas are equal, by checksum; each
    checkpoint is then checked as well (0: never). timeout: seconds after which a lost or hanging rank ends the run.
    max_restarts: how often in a row, without a new checkpoint, `llmtrain run` and jobs of `llmtrain submit` restart the
    ranks after one was lost; `llmtrain run` restarts on fewer ranks if it lost the same one twice and parallel.data is
    auto.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    steps: Steps = 1000
    global_batch: BatchSize = 8
    microbatch: BatchSize | Literal["auto"] = "auto"
    attention: Kernel | Literal["auto"] = "auto"
    eval_every: StepsOrNever = 100
    eval_batches: Steps = 8
    compile: bool | Literal["auto"] = "auto"
    deterministic: bool = False
    max_skipped: Steps = 10
    compare_every: StepsOrNever = 1000
    timeout: Seconds = 600.0
    max_restarts: StepsOrNever = 0


@dataclass(frozen=True, kw_only=True)
class EveryK:
    """Activation checkpointing in groups of blocks: only the inputs of groups are kept. every: blocks of a group; a
    list gives those of each stage of the pipeline."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    every: Layers | tuple[Layers, ...]

    def __post_init__(self) -> None:
        if not self.every:
            raise ValueError("every is []; expected the blocks of a group of each stage")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run. See each section's class for its keys.

    seed: seed of the weights, the order of the data and dropout. activation_checkpointing: none; full (each block is
    recomputed on its own); {every: k} (k blocks at a time; [j, k] gives the number of each stage of a pipeline); auto
    (none if that fits accelerator.memory of the cluster, and takes no longer where offloaded weights or gradients move
    for each microbatch; else full, or, where a larger microbatch then fits or no memory is stated, k is, for each
    stage, the factor of its number of layers nearest its square root; AxoNN, section V). cluster: description
    of the machines: a file, the name of a shipped description, or the description itself; auto: each machine is a node
    of the ranks that were started on it, and a run on GPUs of one machine, all alike, has their memory, by NVIDIA's
    driver, and seven eighths of the machine's.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    name: str
    seed: Seed = 1234
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    on_spike: SpikeConfig = field(default_factory=SpikeConfig)
    activation_checkpointing: Literal["none", "full", "auto"] | EveryK = "none"
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    cluster: str | Cluster = "auto"

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith(".") or len(self.name.encode()) > 200:
            raise ValueError(f"name is {self.name!r}; it names the run's folder, so it needs a plain file name")
