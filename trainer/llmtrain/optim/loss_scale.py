"""Dynamic loss scaling for fp16 (Micikevicius et al., Mixed Precision Training, section 3.2)."""

from dataclasses import dataclass

from llmtrain.optim.config import LossScaling


@dataclass
class LossScale:
    """The factor on the loss; 1 for bf16 and fp32. It halves on overflow and doubles after a window of steps
    without overflow."""

    value: float
    window: int
    good_steps: int = 0

    @classmethod
    def of(cls, scaling: LossScaling, compute: str) -> "LossScale":
        """Return the initial scale of a run in this compute dtype."""
        return cls(scaling.loss_scale if compute == "fp16" else 1.0, scaling.loss_scale_window)

    def update(self, finite: bool, dynamic: bool) -> None:
        """Update the scale after one step; do nothing unless `dynamic`. finite: whether all gradients were."""
        if not dynamic:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.good_steps >= self.window:
            self.value, self.good_steps = self.value * 2, 0
