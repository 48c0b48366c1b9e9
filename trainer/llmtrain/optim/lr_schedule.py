"""Learning-rate schedules: pure functions of the step."""

from math import cos, pi

from llmtrain.optim.config import AdamW


def learning_rate(config: AdamW, step: int, steps: int) -> float:
    """Return the learning rate of `step` (counted from 0) in a run of `steps`.

    Linear warm-up to `lr`, then: cosine or linear decay to `min_lr * lr` at the last step; constant; or wsd, constant
    until the last `decay` share of the run, then linear to `min_lr * lr`.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    floor = config.lr * config.min_lr
    match config.schedule:
        case "constant":
            return config.lr
        case "cosine":
            progress = _progress(step, config.warmup, steps)
            return floor + (config.lr - floor) * (1 + cos(pi * progress)) / 2
        case "linear":
            return config.lr + (floor - config.lr) * _progress(step, config.warmup, steps)
        case "wsd":
            start = max(config.warmup, round(steps * (1 - config.decay)))
            return config.lr + (floor - config.lr) * _progress(step, start, steps)


def _progress(step: int, start: int, steps: int) -> float:
    """Return how far `step` is from `start` to the last step, from 0 to 1."""
    return min(1.0, max(0, step - start) / max(1, steps - 1 - start))
