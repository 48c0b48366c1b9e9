"""The plan of a run: all decisions before it starts, frozen. No torch in here.

`make_plan` makes it once from a recipe and the facts of the run. What runs takes the plan and never the recipe: nothing
in it is `auto`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from llmtrain_data.config import DataConfig
from llmtrain_kernels.attention.choice import Kernel

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.tiers import Tier
from llmtrain.model.config import GPTConfig
from llmtrain.optim.config import AdamW, LossScaling, SpikeConfig
from llmtrain.plan.activation_offload import ActivationOffload
from llmtrain.plan.checkpointing import Checkpointing
from llmtrain.plan.facts import Device
from llmtrain.plan.offload import Offload
from llmtrain.plan.pipeline.actions import Schedule
from llmtrain.plan.pipeline.stage_layout import StageLayout
from llmtrain.plan.placement import Placement
from llmtrain.recipe.logging import LoggingConfig
from llmtrain.recipe.pipeline import ScheduleName

Compute = Literal["fp32", "bf16", "fp16"]
COMPUTE_BYTES: Mapping[Compute, int] = MappingProxyType({"fp32": 4, "bf16": 2, "fp16": 2})
"""Bytes of an element of each compute dtype."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The batch of one optimizer step. sequences: sequences of the global batch. microbatch: sequences that a rank
    computes at the same time. microbatches: microbatches of each replica in a step."""

    sequences: int
    sequence_length: int
    microbatch: int
    microbatches: int

    @property
    def tokens(self) -> int:
        """Tokens of the global batch."""
        return self.sequences * self.sequence_length


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Bits of quantized elements, 0 for unquantized. weights: in gathers of weights. secondary: in the secondary copy.
    gradients: in reductions of gradients. block: elements that share a scale."""

    weights: int
    secondary: int
    gradients: int
    block: int

    @property
    def any(self) -> bool:
        """Whether anything is quantized."""
        return bool(self.weights or self.secondary or self.gradients)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Where model states are held and how they are communicated. placements: placement of each unit, by name. resident:
    bytes of a rank's memory for gathered weights; 0 for the least in which two units are gathered ahead. offload: what
    is offloaded, and where it rests. registered: whether NCCL has registered the buffers of gathers and reductions."""

    placements: Mapping[str, Placement]
    resident: int
    quantization: Quantization
    offload: Offload = field(default_factory=Offload)
    registered: bool = False


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The pipeline. name: name of the schedule; 1f1b for one stage. schedule: every rank's actions; none for
    message-driven. layers: layers of each stage. stages: stages of each rank of the pipeline, by chunk. limit:
    microbatches in flight with message-driven. transport: library that carries messages between stages."""

    name: ScheduleName
    schedule: Schedule
    layers: tuple[int, ...]
    stages: tuple[tuple[StageLayout, ...], ...]
    limit: int
    transport: Literal["torch", "mpi"]

    @property
    def recompute(self) -> tuple[int, ...]:
        """Blocks of one group of activation checkpointing of each stage, 0 for none."""
        layouts = (layout for stage_layouts in self.stages for layout in stage_layouts)
        return tuple(layout.recompute for layout in sorted(layouts, key=lambda layout: layout.stage))


AttentionBackend = Literal["flash", "efficient", "math"]
"""Kernels of attention. flash: keeps a normalizer of each query; flash-attn's, torch's or our own. efficient: torch's
memory-efficient kernel, which pads the normalizers. math: separate operations, which keep the attention weights."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What the kernels of a run keep for the backward pass.

    attention: kernel of attention. head_multiple, query_multiple: it pads the channels of a head and the normalizers of
    the queries to multiples of these. seeds: bytes of random seeds that it keeps. statistic: bytes of a statistic that
    a norm keeps, 0 if it computes them again. mask: bytes of an element of a dropout mask. weights_mask: the same for
    attention weights. generator: bytes of the random generator's state that a recomputed group with dropout keeps in
    the device's memory. logit: bytes that the loss takes for each logit of a chunk, besides the logit.
    rotates_in_place: whether the rotary embedding overwrites the product of queries, keys and values. adds_to_fp32:
    whether a product of 16 bits adds to a sum in fp32 by itself.
    """

    attention: AttentionBackend
    head_multiple: int
    query_multiple: int
    seeds: int
    statistic: int
    mask: int
    weights_mask: int
    generator: int
    logit: int
    rotates_in_place: bool
    adds_to_fp32: bool


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of the training loop. See the recipe's `train` section. attention: its kernel on GPUs."""

    steps: int
    eval_every: int
    eval_batches: int
    attention: Kernel
    compile: bool
    deterministic: bool
    max_skipped: int
    compare_every: int
    timeout: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run on given ranks.

    device: what the ranks compute on. grid: the grid of ranks. tiers: tiers of links between all ranks, fastest first.
    cluster: the recipe's description, None without one. compute: dtype of matrix products. kernels: what kernels keep
    for the backward pass. sequence_parallel: whether tensor-parallel ranks split the sequence between layers.
    activation_offload: where the inputs of recomputed groups of blocks rest. import_from: folder of the Hugging Face
    model with the initial weights, None for random weights. record: the recipe, as plain data, that makes this plan
    again; files of the run store it.
    """

    name: str
    seed: int
    model: GPTConfig
    import_from: str | None
    device: Device
    grid: Layout
    tiers: tuple[Tier, ...]
    cluster: Cluster | None
    batch: Batch
    compute: Compute
    kernels: Kernels
    sequence_parallel: bool
    activation_offload: ActivationOffload
    sharding: Sharding
    pipeline: Pipeline
    optimizer: AdamW
    loss_scaling: LossScaling
    spikes: SpikeConfig
    training: Training
    data: DataConfig
    checkpoint: Checkpointing
    logging: LoggingConfig
    record: Mapping[str, Any]

    @property
    def recomputes(self) -> bool:
        """Whether activation checkpointing recomputes blocks: those of all stages, or none."""
        return any(self.pipeline.recompute)

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element of the compute dtype."""
        return COMPUTE_BYTES[self.compute]

    @property
    def gradients(self) -> Compute:
        """The dtype of the sums of gradients."""
        narrow = any(placement.gradients == "compute" for placement in self.sharding.placements.values())
        return self.compute if narrow else "fp32"

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of the sums of gradients."""
        return COMPUTE_BYTES[self.gradients]

    @property
    def sums_runs(self) -> bool:
        """Whether the gradients of consecutive backward passes of a stage are summed before they are reduced."""
        return self.pipeline.name == "breadth-first"

    @property
    def buffered_gradient_bytes(self) -> int:
        """Bytes of an element of gradients in a buffer before their reduction."""
        return self.gradient_bytes if self.sums_runs else self.compute_bytes

    @property
    def reduces_fp32(self) -> bool:
        """Whether ranks send each other sums of gradients in fp32, if they are not quantized."""
        wide = any(placement.reduce == "fp32" for placement in self.sharding.placements.values())
        return wide or self.compute == "fp32"

    @property
    def sends_sums(self) -> bool:
        """Whether ranks send each other sums of gradients, and not only those of one microbatch."""
        placements = self.sharding.placements.values()
        within = ([level.span <= one.degrees.gradients for level in one.levels] for one in placements)
        return self.sums_runs or any(one.hops_after_sum for one in placements) or any(sum(one) > 1 for one in within)

    @property
    def averages_replicas(self) -> bool:
        """Whether tensor-parallel ranks take the mean of their gradients of TP-replicated parameters, which would
        differ: rounding of packed gradients depends on the rest of a block, NCCL chooses the order of its fp32 sums for
        each group, and Inductor times kernels on each rank, which add up in different orders. Ranks that share the
        sequence add up their parts of these gradients, whoever has computed them."""
        compiled = self.training.compile and not self.sequence_parallel
        on_gpu = self.device == "cuda" and (self.reduces_fp32 or compiled)
        return bool(self.sharding.quantization.gradients or on_gpu) and self.grid.degree(Axis.TENSOR) > 1

    def stages_of(self, rank: int) -> tuple[StageLayout, ...]:
        """Return the stages of a rank of the run, by chunk."""
        return self.pipeline.stages[self.grid.coordinate(rank, Axis.PIPELINE)]
