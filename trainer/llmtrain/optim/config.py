"""The recipe's `optimizer` and `precision` sections."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from llmtrain_data.bounds import Factor, Rate, Share, Steps, StepsOrNever
from pydantic import Field

Beta = Annotated[float, Field(ge=0, lt=1)]
# The loss scale of fp16; fp32 holds numbers up to 3e38.
Scale = Annotated[float, Field(ge=1, le=1e30)]
# Every checkpoint holds this many losses.
Window = Annotated[int, Field(ge=1, le=100_000)]


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW and its learning-rate schedule, without the kernel that computes it. See OptimizerConfig for the fields."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    name: Literal["adamw"] = "adamw"
    lr: Rate = 3e-4
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Factor = 1e-8
    weight_decay: Rate = 0.1
    clip: Rate = 1.0
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup: StepsOrNever = 100
    min_lr: Share = 0.1
    decay: Share = 0.2


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(AdamW):
    """AdamW and its learning-rate schedule.

    name: the optimizer. lr: learning rate after the warm-up. betas: decay of the first and second moments. eps: added
    to the square root of the second moment. weight_decay: decoupled weight decay of matrices. schedule: learning rate
    after the warm-up; wsd stays constant, then decays linearly. clip: largest global gradient norm (0 turns clipping
    off). warmup: steps of linear warm-up. min_lr: final learning rate of cosine, linear and wsd, as a share of `lr`.
    decay: share of the run's steps over which wsd decays. backend: kernel of the optimizer step; cpu is C++, torch is
    PyTorch's fused kernel, and reference is plain torch operations, which are slower (auto: cpu on CPUs; on CUDA triton
    where Triton is installed, else apex if it is installed, else torch).
    """

    backend: Literal["auto", "cpu", "triton", "torch", "apex", "reference"] = "auto"


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """The dynamic loss scale of fp16. See PrecisionConfig for the fields."""

    loss_scale: float
    loss_scale_window: int


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The dtype of matrix products, of sums of gradients and of what ranks send of them; master weights and optimizer
    states stay fp32.

    compute: auto is bf16 on CUDA (fp16 on NVIDIA's GPUs before compute capability 8.0) and fp32 on CPU. gradients:
    dtype of the sums of gradients over microbatches: fp32, or compute (that of `compute`), which takes 2 bytes of an
    element in place of 4 and rounds after every microbatch (AxoNN, section V). reduce: dtype of the sums that ranks
    send each other: compute, or fp32, which rounds no sum; gradients that are no sums yet are sent in the dtype of
    `compute`, which they have. Ranks add them in fp32 either way; quantized gradients are sent quantized. loss_scale:
    first loss scale of fp16, which halves on overflow and doubles after loss_scale_window steps without overflow.
    loss_scale_window: steps without overflow after which the loss scale doubles.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    compute: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    gradients: Literal["fp32", "compute"] = "fp32"
    reduce: Literal["fp32", "compute"] = "compute"
    loss_scale: Scale = 65536.0
    loss_scale_window: Steps = 1000


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """What happens when the loss jumps.

    threshold: a loss above this multiple of the median of the losses before it is a spike (0: no loss is). window:
    number of applied steps whose losses the median is taken over; earlier losses are never spikes. action: skip leaves
    out the step's update; rewind goes back to the last checkpoint that was due (one that a stop left changes nothing)
    and skips the data up to the spike.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    threshold: Rate = 0.0
    window: Window = 50
    action: Literal["skip", "rewind"] = "skip"

    def __post_init__(self) -> None:
        if self.threshold != 0 and self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; it must be above 1, or 0 for no spikes")

    @property
    def rewinds(self) -> bool:
        """Whether a spike may rewind the run."""
        return self.threshold > 0 and self.action == "rewind"
