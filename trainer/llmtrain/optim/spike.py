"""Detection of loss spikes."""

from statistics import median

from llmtrain.optim.config import SpikeConfig


def is_spike(config: SpikeConfig, losses: list[float], loss: float) -> bool:
    """Return whether `loss` is a spike after `losses`, the losses of the newest applied steps.

    All ranks have the same losses, so all return the same.
    """
    if not config.threshold or len(losses) < config.window:
        return False
    # The median may be 0, so it is no divisor.
    return loss > config.threshold * median(losses)


def remember(config: SpikeConfig, losses: list[float], loss: float) -> None:
    """Add the loss of an applied step to `losses`, and drop those before the window; all, if nothing is a spike."""
    losses.append(loss)
    del losses[: -config.window if config.threshold else None]
