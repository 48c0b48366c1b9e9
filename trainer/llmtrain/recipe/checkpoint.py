"""The recipe's `checkpoint` section."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from llmtrain_data.bounds import Steps, StepsOrNever
from pydantic import Field


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save and what to start from.

    every: steps between checkpoints (0: only at the end). keep: how many complete ones stay.
    async: write in the background while training goes on.
    resume: auto continues the run folder's newest sound checkpoint if there is one; never starts anew in an
    empty folder; anything else is the folder of a run or of a checkpoint to start from.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    every: StepsOrNever = 500
    keep: Steps = 3
    asynchronous: Annotated[bool, Field(alias="async")] = True
    resume: str = "auto"
