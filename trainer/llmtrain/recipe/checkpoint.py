"""The recipe's `checkpoint` section."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from llmtrain_data.bounds import Steps, StepsOrNever
from pydantic import Field


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and what to start from.

    every: steps between checkpoints (0: only at the end). keep: number of complete checkpoints to keep.
    async: write in the background while training continues, from copies in the host's memory; otherwise none are made.
    Offloaded states are written without copies, and the next optimizer step waits until they are read.
    resume: auto resumes from the newest undamaged checkpoint in the run's folder, if there is one; never starts from
    the beginning and requires a folder without checkpoints; any other value is the folder of a run or of a checkpoint
    whose training the run continues: its weights, optimizer states, steps and position in the data.
    weights: folder of a run or of a checkpoint, with whose weights alone the run starts at step 0: a second stage, such
    as fine-tuning. The model must be the same. A run that has checkpoints of its own resumes from those.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    every: StepsOrNever = 500
    keep: Steps = 3
    asynchronous: Annotated[bool, Field(alias="async")] = True
    resume: str = "auto"
    weights: str | None = None
