"""Cross-entropy of rows of which this process has some logits, and other processes have the others.

Each process sends the statistics of its logits to the others, and computes the gradient from the statistics of all.
"""

from typing import Protocol

import torch
from torch import Tensor

from llmtrain_kernels.triton_launch import takes_triton


class PartialLosses(Protocol):
    """The logits of this process. statistics: fp32 `[3, rows]`: each row's largest logit, the sum of
    `exp(logit - largest)`, and the target's logit, or 0 where another process has it."""

    statistics: Tensor

    def write_gradient(self, top: Tensor, normalizer: Tensor) -> None:
        """Overwrite the logits with the gradient. top: each row's largest logit, of all processes; normalizer: its sum
        of `exp(logit - top)`; both fp32 `[rows]`. At most once."""


def partial_losses(logits: Tensor, targets: Tensor) -> PartialLosses:
    """Compute the statistics of the logits `[rows, vocab of this process]`.

    targets: int64 `[rows]`, counted from the first id that this process has; those of others are outside of the row.
    """
    return TritonLosses(logits, targets) if takes_triton(logits) else ReferenceLosses(logits, targets)


class ReferenceLosses:
    """`partial_losses` with torch operations."""

    def __init__(self, logits: Tensor, targets: Tensor) -> None:
        self._logits, self._local = logits, (targets >= 0) & (targets < logits.shape[1])
        self._indices = targets.masked_fill(~self._local, 0).unsqueeze(1)
        top = logits.amax(1, keepdim=True).float()
        self._shares = (logits - top).exp_()
        picked = logits.gather(1, self._indices).squeeze(1).float().masked_fill_(~self._local, 0.0)
        self.statistics = torch.stack((top.squeeze(1), self._shares.sum(1), picked))

    def write_gradient(self, top: Tensor, normalizer: Tensor) -> None:
        """See `PartialLosses`."""
        self._shares.mul_(((self.statistics[0] - top).exp_() / normalizer).unsqueeze(1))
        self._logits.copy_(self._shares.scatter_add_(1, self._indices, -self._local.unsqueeze(1).float()))


class TritonLosses:
    """`partial_losses` in Triton: it keeps no exponentials, and computes them again from the logits."""

    def __init__(self, logits: Tensor, targets: Tensor) -> None:
        from llmtrain_kernels.cross_entropy import triton_backend

        self._backend, self._logits, self._targets = triton_backend, logits, targets
        self.statistics = triton_backend.statistics(logits, targets)

    def write_gradient(self, top: Tensor, normalizer: Tensor) -> None:
        """See `PartialLosses`."""
        self._backend.write_gradient(self._logits, self._targets, top, normalizer)
