"""The least time of a step that the datasheet of a described accelerator allows. No torch in here."""

from dataclasses import dataclass

from llmtrain.cluster.description import Accelerator
from llmtrain.cluster.quantity import quantity
from llmtrain.plan.flops import datasheet_peak, flops_per_token
from llmtrain.plan.plan import Plan
from llmtrain.plan.states import most_states


@dataclass(frozen=True)
class LeastTime:
    """Lower bounds in seconds; None where the description states no speed. compute: of the products of all
    microbatches, at the accelerator's peak. optimizer: of the optimizer's reads and writes, at the bandwidth of its
    memory."""

    compute: float | None
    optimizer: float | None


def least_time(plan: Plan) -> LeastTime:
    """Return the lower bounds of a step's times."""
    accelerator = plan.cluster.accelerator if plan.cluster else None
    if accelerator is None:
        return LeastTime(None, None)
    peak, rate = _peak(plan, accelerator), accelerator.bandwidth
    flops = flops_per_token(plan.model, plan.batch.sequence_length) * plan.batch.tokens / plan.grid.world
    return LeastTime(
        None if peak is None else flops / peak, None if rate is None else _moved(plan) / quantity(rate, "byte/s")
    )


def _peak(plan: Plan, accelerator: Accelerator) -> float | None:
    """Return FLOP/s in the compute dtype: as stated, or else those of a card with the accelerator's name."""
    stated = accelerator.peak.get(plan.compute)
    if stated is not None:
        return quantity(stated, "FLOP/s")
    return None if accelerator.name is None else datasheet_peak(accelerator.name, plan.compute)


def _moved(plan: Plan) -> int:
    """Return the bytes that the optimizer reads and writes on the rank that holds most: masters and moments both ways,
    gradients, and the new weights where those are not the masters."""
    states = most_states(plan)
    elements = states.moments // 8
    own_weights = plan.compute_bytes if states.masters else 0
    return elements * (2 * (4 + 8) + 4 + own_weights)
