"""The least time of a step that a described accelerator and its host allow. No torch in here."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain.cluster.description import Accelerator
from llmtrain.cluster.quantity import quantity
from llmtrain.plan.cost.lane_times import CPU, LINK, LaneTime, busiest, volume_paths
from llmtrain.plan.cost.optimizer_traffic import resident_step_bytes
from llmtrain.plan.flops import datasheet_peak
from llmtrain.plan.per_rank.states import most_states
from llmtrain.plan.pipeline.layer_split import recomputed_flops, stage_costs
from llmtrain.plan.plan import Plan


@dataclass(frozen=True)
class LeastTime:
    """Lower bounds of a step's parts, in seconds; None where the description states no speed.

    compute: the matrix products of all microbatches, with those that activation checkpointing repeats, at the
    accelerator's peak; the mean of all ranks. optimizer: reads and writes of AdamW for the states that stay on the
    accelerator, at its memory bandwidth. host: reads and writes of AdamW for the states that the CPUs of a node step
    (all states on a CPU), at the bandwidth of the host's memory. volumes: the reads or the writes of one volume by all
    ranks of its node, whichever takes longest, at its bandwidth. link: the copies between a GPU and its host in the
    slower direction, at the bandwidth of that link.
    """

    compute: float | None
    optimizer: float | None
    host: float | None = None
    volumes: float | None = None
    link: float | None = None


def least_time(plan: Plan, found: Sequence[LaneTime]) -> LeastTime:
    """Return the lower bounds of a step's times. found: the plan's lanes."""
    accelerator = plan.cluster.accelerator if plan.cluster else None
    peak = None if accelerator is None else compute_peak(plan, accelerator)
    rate = None if accelerator is None else accelerator.bandwidth
    return LeastTime(
        None if peak is None else computed_flops(plan) / plan.grid.world / peak,
        None if rate is None else resident_step_bytes(plan, most_states(plan)) / quantity(rate, "byte/s"),
        busiest(found, CPU),
        busiest(found, *volume_paths(plan)),
        busiest(found, LINK),
    )


def computed_flops(plan: Plan) -> float:
    """Return the FLOPs that all ranks compute in a step, at least."""
    costs = stage_costs(plan.model, plan.batch.sequence_length)
    within, ends = (recomputed_flops(plan.model, plan.batch.sequence_length, end) for end in (False, True))
    layouts = [layout for stage_layouts in plan.pipeline.stages for layout in stage_layouts]
    groups = [len(group) for layout in layouts for group in layout.groups]
    again = sum((size - 1) * within + ends for size in groups)
    return plan.batch.tokens * (costs.embedding + plan.model.layers * costs.layer + again + costs.head)


def step_threads(plan: Plan) -> int | None:
    """Return the threads with which each rank of a GPU steps offloaded states: its even share of the host's cores. None
    where the description does not state them, or where the CPU steps nothing."""
    host = plan.cluster.node.host if plan.cluster else None
    offload = plan.sharding.offload
    if plan.cluster is None or host is None or host.cores is None or not offload.share or offload.on_device:
        return None
    return max(1, host.cores // plan.cluster.node.ranks)


def compute_peak(plan: Plan, accelerator: Accelerator) -> float | None:
    """Return FLOP/s in the compute dtype: as stated, or else those of a card with the accelerator's name; None if that
    is not known."""
    stated = accelerator.peak.get(plan.compute)
    if stated is not None:
        return quantity(stated, "FLOP/s")
    return None if accelerator.name is None else datasheet_peak(accelerator.name, plan.compute)
