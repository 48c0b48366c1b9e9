"""The forward and backward passes of a step, and what all ranks know after them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.cluster.layout import Axis
from llmtrain.optim.clipping import step_divisor
from llmtrain.plan.plan import Plan
from llmtrain.telemetry.step_record import is_logged
from llmtrain.training.run import Run


@dataclass(frozen=True)
class Passes:
    """What a step's passes have led to, the same on all ranks. sums: over ranks, fp64 `[3 + n]` on the device or the
    host: the mean loss of the global batch, how many ranks were asked to stop, the squared norm of the scaled
    gradients, and `own_seconds`."""

    sums: Tensor

    @property
    def loss(self) -> Tensor:
        """The mean loss of the global batch."""
        return self.sums[0]

    @property
    def norm(self) -> Tensor:
        """The norm of the scaled gradients."""
        return self.sums[2].sqrt()

    @property
    def stopping(self) -> bool:
        """Whether any rank was asked to stop. On the host."""
        return bool(self.sums[1] > 0)

    @property
    def rank_seconds(self) -> list[float]:
        """`own_seconds` of all ranks. On the host."""
        found: list[float] = self.sums[3:].tolist()
        return found

    def divisor(self, loss_scale: float, clip: float) -> Tensor:
        """Return the divisor of the gradients, where `sums` is; see `step_divisor`."""
        return step_divisor(self.loss, self.norm, loss_scale, clip)


def decided_on_device(plan: Plan) -> bool:
    """Return whether the device clips and skips an optimizer step itself: a GPU, unless the host steps, or compares the
    loss with those before, or the kernel cannot skip."""
    offload = plan.sharding.offload
    kernels = {placement.backend for placement in plan.sharding.placements.values()}
    stays = not offload.share and offload.gradients == "device"
    return plan.device == "cuda" and stays and not plan.spikes.threshold and kernels <= {"torch", "triton"}


def forward_backward(run: Run, step: int) -> Passes:
    """Run a step's forward and backward passes. Return their sums, on the device. Collective."""
    plan, ranks = run.plan, run.ranks
    batch, microbatch = plan.batch.sequences, plan.batch.microbatch
    rows = run.batches.take(run.progress.samples, more=step + 1 < plan.training.steps)
    share = microbatch / batch
    losses = run.executor.train(rows.split(microbatch), share * run.scale.value)
    # One small all-reduce for everything: each further one would wait again for the slowest rank.
    square, speaks = run.engine.gradients.squared_norm(), ranks.layout.coordinate(ranks.rank, Axis.TENSOR) == 0
    own: list[float | torch.Tensor] = [losses.double() * share * speaks, float(run.stop.asked), square]
    return Passes(ranks.sums([*own, *own_seconds(run, step)]))


def own_seconds(run: Run, step: int) -> list[float]:
    """Return, by rank, the seconds of a step's passes without waiting for others: this rank's own, and 0 for others.

    Empty if the step is not logged, and in a run of one rank.
    """
    ranks = run.ranks
    if not is_logged(run.plan, step + 1) or ranks.layout.world == 1:
        return []
    seconds = [0.0] * ranks.layout.world
    seconds[ranks.rank] = ranks.activity.own_seconds()
    return seconds
