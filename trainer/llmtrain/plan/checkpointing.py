"""When a run saves checkpoints, and what it starts from."""

from dataclasses import dataclass
from pathlib import Path

from llmtrain.recipe.checkpoint import CheckpointConfig


@dataclass(frozen=True)
class ResumeOwn:
    """The run resumes from its newest undamaged checkpoint, if there is one."""


@dataclass(frozen=True)
class StartFresh:
    """The run starts from the beginning, and has no checkpoints."""


@dataclass(frozen=True)
class StartFrom:
    """The run resumes from its own checkpoints or, without one, starts from those of another. folder: of a run or of a
    checkpoint."""

    folder: Path


Start = ResumeOwn | StartFresh | StartFrom


@dataclass(frozen=True)
class Checkpointing:
    """When a run saves checkpoints, and what it starts from. every, keep, asynchronous: see CheckpointConfig."""

    every: int
    keep: int
    asynchronous: bool
    start: Start


def checkpointing(config: CheckpointConfig) -> Checkpointing:
    """Return what a recipe's section says."""
    return Checkpointing(config.every, config.keep, config.asynchronous, _start(config.resume))


def _start(resume: str) -> Start:
    if resume == "auto":
        return ResumeOwn()
    return StartFresh() if resume == "never" else StartFrom(Path(resume))
