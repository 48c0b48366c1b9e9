"""The recipe's `optimizer` and `precision` sections."""

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule.

    clip: largest global gradient norm (0 turns clipping off). warmup: steps of linear warm-up.
    min_lr: share of `lr` that cosine, linear and wsd end on. decay: share of the run's steps over which
    wsd decays. backend: what computes the step (auto: apex on CUDA when there, else torch's fused kernel).
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    name: Literal["adamw"] = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup: int = 100
    min_lr: float = 0.1
    decay: float = 0.2
    backend: Literal["auto", "torch", "apex", "reference"] = "auto"

    def __post_init__(self) -> None:
        for key, low in (("lr", 0.0), ("eps", 0.0), ("weight_decay", 0.0), ("clip", 0.0), ("warmup", 0)):
            if getattr(self, key) < low:
                raise ValueError(f"{key} is {getattr(self, key)}; it must not be negative")
        for key in ("min_lr", "decay"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"{key} is {getattr(self, key)}; it must lie between 0 and 1")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas is {list(self.betas)}; both must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """What the matrix products compute in; masters, gradients sums and optimizer states stay fp32.

    compute: auto is bf16 on CUDA and fp32 on CPU. loss_scale: first loss scale of fp16, which halves on
    overflow and doubles after loss_scale_window steps without one.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    compute: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    loss_scale: float = 65536.0
    loss_scale_window: int = 1000

    def __post_init__(self) -> None:
        if self.loss_scale < 1:
            raise ValueError(f"loss_scale is {self.loss_scale}; it must be at least 1")
        if self.loss_scale_window < 1:
            raise ValueError(f"loss_scale_window is {self.loss_scale_window}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """What happens when the loss jumps.

    threshold: a spike is a loss of more than so many times the median of those before it (0: none is). window: losses
    of applied steps that the median is of; nothing is a spike before there are as many. action: skip leaves the step's
    update out; rewind goes back to the last checkpoint and passes over the data up to that of the spike.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    threshold: float = 0.0
    window: int = 50
    action: Literal["skip", "rewind"] = "skip"

    def __post_init__(self) -> None:
        if self.threshold != 0 and self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; it must be above 1, or 0 for no spikes")
        if self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1")
