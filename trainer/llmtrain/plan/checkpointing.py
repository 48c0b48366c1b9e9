"""When a run saves checkpoints, and what it starts from."""

from dataclasses import dataclass
from pathlib import Path

from llmtrain.recipe.checkpoint import CheckpointConfig


@dataclass(frozen=True)
class Origin:
    """What a run without checkpoints of its own starts from. key: of the recipe, which names it. folder: of a run or of
    a checkpoint. alone: whether the run takes its weights alone, and neither optimizer states nor progress."""

    key: str
    folder: Path
    alone: bool


@dataclass(frozen=True)
class Checkpointing:
    """When a run saves checkpoints, and what it starts from.

    every, keep, asynchronous: see CheckpointConfig. resumes: whether the run resumes from its newest undamaged
    checkpoint; otherwise it must have none. origin: None for a start from the beginning.
    """

    every: int
    keep: int
    asynchronous: bool
    resumes: bool
    origin: Origin | None


def checkpointing(config: CheckpointConfig) -> Checkpointing:
    """Return what a recipe's section says."""
    return Checkpointing(config.every, config.keep, config.asynchronous, config.resume != "never", _origin(config))


def _origin(config: CheckpointConfig) -> Origin | None:
    if config.weights is not None:
        return Origin("checkpoint.weights", Path(config.weights), alone=True)
    if config.resume in ("auto", "never"):
        return None
    return Origin("checkpoint.resume", Path(config.resume), alone=False)
