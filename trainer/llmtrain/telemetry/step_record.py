"""The raw numbers of a step, and which steps are logged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtrain.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Raw numbers of one optimizer step.

    step: counted from 1. tokens: trained up to and including this step. loss: mean over the global batch, in
    nats. grad_norm: before clipping. seconds: wall time of the step, data included. skipped_steps: number of steps so
    far without an update, because of a spike or a number that is not finite. passed_batches: number of global batches
    that rewinds skipped. rank_seconds: each rank's seconds, waits for other ranks excluded; empty if the step is not
    logged. loss_scale: None unless the run computes in fp16. offload: what the rank's offloaded states moved in the
    step: `read_bytes`, `written_bytes` and `waits_s` of each volume, `wait_s`, on a GPU `to_host_bytes`,
    `to_device_bytes` and `gpu_wait_s`, and with offloaded optimizer states `compute_wait_s`; None without them.
    save_held: seconds for which the checkpoint before held up the optimizer.
    """

    step: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float
    skipped_steps: int = 0
    passed_batches: int = 0
    rank_seconds: Sequence[float] = ()
    loss_scale: float | None = None
    offload: Mapping[str, Any] | None = None
    save_held: float = 0.0


def is_logged(plan: Plan, step: int) -> bool:
    """Return whether a step, counted from 1, is logged. A resumed run logs the same steps as an uninterrupted one."""
    return step % plan.logging.every == 0 or step in (1, plan.training.steps)
