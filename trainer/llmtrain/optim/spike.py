"""Telling a loss that jumps from one that wanders."""

from statistics import median

from llmtrain.optim.config import SpikeConfig


def is_spike(config: SpikeConfig, losses: list[float], loss: float) -> bool:
    """Return whether `loss` is a spike after `losses`, those of the newest applied steps.

    The same on all ranks, as the losses are.
    """
    return 0 < config.threshold < loss / median(losses) if len(losses) >= config.window else False


def remember(config: SpikeConfig, losses: list[float], loss: float) -> None:
    """Add the loss of an applied step to `losses`, which keeps as many as `config` asks for."""
    if config.threshold:
        losses.append(loss)
        del losses[: -config.window]
