"""The recipe's `logging` section."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from llmtrain_data.bounds import Steps


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """The run's folder, and what is logged.

    every: steps between logged lines. dir: folder in which the run's folder `dir/name` is. wandb: off, offline (written
    to the run's folder, for `wandb sync`) or online. wandb_project: project at Weights & Biases.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    every: Steps = 10
    dir: str = "runs"
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "llmtrain"
