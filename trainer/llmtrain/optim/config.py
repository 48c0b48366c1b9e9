"""The recipe's `optimizer` and `precision` sections."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from llmtrain_data.bounds import Rate, Share, Steps, StepsOrNever
from pydantic import Field

Beta = Annotated[float, Field(ge=0, lt=1)]
# Of fp16; fp32 holds numbers up to 3e38.
Scale = Annotated[float, Field(ge=1, le=1e30)]
# Losses that every checkpoint holds.
Window = Annotated[int, Field(ge=1, le=100_000)]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule.

    name: the optimizer. lr: learning rate after the warm-up. betas: decay of the first and second moments. eps: added
    to the root of the second moment. weight_decay: decoupled weight decay of matrices. schedule: how the learning rate
    goes on after the warm-up; wsd stays constant, then decays linearly. clip: largest global gradient norm (0 turns
    clipping off). warmup: steps of linear warm-up. min_lr: share of `lr` that cosine, linear and wsd end on. decay:
    share of the run's steps over which wsd decays. backend: what computes the step (auto: apex on CUDA when there, else
    torch's fused kernel).
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    name: Literal["adamw"] = "adamw"
    lr: Rate = 3e-4
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Rate = 1e-8
    weight_decay: Rate = 0.1
    clip: Rate = 1.0
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup: StepsOrNever = 100
    min_lr: Share = 0.1
    decay: Share = 0.2
    backend: Literal["auto", "torch", "apex", "reference"] = "auto"


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """The optimizer of a plan. See OptimizerConfig for the fields."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float
    schedule: Literal["cosine", "linear", "constant", "wsd"]
    warmup: int
    min_lr: float
    decay: float
    backend: Literal["torch", "apex", "reference"]


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """The dynamic loss scale of fp16. See PrecisionConfig for the fields."""

    loss_scale: float
    loss_scale_window: int


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """What the matrix products compute in; masters, gradients sums and optimizer states stay fp32.

    compute: auto is bf16 on CUDA and fp32 on CPU. loss_scale: first loss scale of fp16, which halves on overflow and
    doubles after loss_scale_window steps without one. loss_scale_window: steps without an overflow after which the loss
    scale doubles.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    compute: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    loss_scale: Scale = 65536.0
    loss_scale_window: Steps = 1000


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """What happens when the loss jumps.

    threshold: a spike is a loss of more than so many times the median of those before it (0: none is). window: losses
    of applied steps that the median is of; nothing is a spike before there are as many. action: skip leaves the step's
    update out; rewind goes back to the last checkpoint and passes over the data up to that of the spike.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    threshold: Rate = 0.0
    window: Window = 50
    action: Literal["skip", "rewind"] = "skip"

    def __post_init__(self) -> None:
        if self.threshold != 0 and self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; it must be above 1, or 0 for no spikes")
