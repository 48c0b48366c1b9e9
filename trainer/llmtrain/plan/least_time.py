"""The least time of a step that a described accelerator and its host allow. No torch in here."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from llmtrain.cluster.description import Accelerator
from llmtrain.cluster.layout import Axis
from llmtrain.cluster.quantity import quantity
from llmtrain.plan.facts import Device
from llmtrain.plan.flops import datasheet_peak, flops_per_token
from llmtrain.plan.near_volumes import volume_shares
from llmtrain.plan.pipeline.stage_layout import units_of
from llmtrain.plan.plan import Plan
from llmtrain.plan.rank_buckets import rank_buckets
from llmtrain.plan.roles import roles
from llmtrain.plan.states import most_states, state_bytes


@dataclass(frozen=True)
class LeastTime:
    """Lower bounds in seconds; None where the description states no speed.

    compute: of the products of all microbatches, at the accelerator's peak. optimizer: of the optimizer's reads and
    writes, at the bandwidth of the accelerator's memory. host: of those of offloaded states by the CPUs of a node, at
    the bandwidth of the host's memory. volumes: of reading and writing the files of a node's ranks, both at once, at
    the bandwidth of its volumes.
    """

    compute: float | None
    optimizer: float | None
    host: float | None = None
    volumes: float | None = None


def least_time(plan: Plan, device: Device) -> LeastTime:
    """Return the lower bounds of a step's times. device: what computes."""
    accelerator = plan.cluster.accelerator if plan.cluster else None
    host, volumes = _host_seconds(plan, device), _volume_seconds(plan)
    if accelerator is None:
        return LeastTime(None, None, host, volumes)
    peak, rate = _peak(plan, accelerator), accelerator.bandwidth
    flops = flops_per_token(plan.model, plan.batch.sequence_length) * plan.batch.tokens / plan.grid.world
    return LeastTime(
        None if peak is None else flops / peak,
        None if rate is None else _moved(plan) / quantity(rate, "byte/s"),
        host,
        volumes,
    )


def step_threads(plan: Plan) -> int | None:
    """Return the threads with which each rank of a GPU steps offloaded states: its even share of the host's cores. None
    where the description does not state them, or where the CPU steps nothing."""
    host = plan.cluster.node.host if plan.cluster else None
    if plan.cluster is None or host is None or host.cores is None or not plan.sharding.offload.share:
        return None
    return max(1, host.cores // plan.cluster.node.ranks)


def _host_seconds(plan: Plan, device: Device) -> float | None:
    host = plan.cluster.node.host if plan.cluster else None
    if host is None or host.bandwidth is None:
        return None
    moved = _most_of_a_node(plan, lambda rank: _stepped_bytes(plan, rank, device))
    return moved / quantity(host.bandwidth, "byte/s") if moved else None


def _volume_seconds(plan: Plan) -> float | None:
    rates = {one.path: one.bandwidth for one in plan.cluster.node.nvme} if plan.cluster else {}
    files = _most_of_a_node(plan, lambda rank: sum(one.nbytes for one in rank_buckets(plan, rank)))
    volumes = volume_shares(plan) if plan.sharding.offload.tier == "nvme" else []
    known = [(one.share, rate) for one in volumes if (rate := rates.get(one.path)) is not None]
    if not known or len(known) < len(volumes):
        return None
    return max(files * share / quantity(rate, "byte/s") for share, rate in known)


def _most_of_a_node(plan: Plan, of_rank: Callable[[int], int]) -> int:
    """Return the most bytes of all ranks of a node together. of_rank: bytes of a rank."""
    if plan.cluster is None:
        return 0
    size, grid = plan.cluster.node.ranks, plan.grid

    @cache
    def of_place(pipeline: int, tensor: int) -> int:
        return of_rank(grid.group_of(0, Axis.PIPELINE)[pipeline] + grid.group_of(0, Axis.TENSOR)[tensor])

    def of_node(first: int) -> int:
        ranks = range(first, min(first + size, grid.world))
        return sum(of_place(grid.coordinate(rank, Axis.PIPELINE), grid.coordinate(rank, Axis.TENSOR)) for rank in ranks)

    return max(of_node(first) for first in {role.rank // size * size for role in roles(plan)})


def _stepped_bytes(plan: Plan, rank: int, device: Device) -> int:
    """Return the bytes that the host's CPU reads and writes to step the states of a rank."""
    outside = rank_buckets(plan, rank)
    elements = sum(one.end - one.start for one in outside)
    separate = any(one.states == 3 for one in outside)
    if device == "cpu":
        units = units_of(plan.model, plan.stages_of(rank), *_tensor_place(plan, rank))
        stays = state_bytes(units, plan.sharding, plan.compute_bytes, plan.grid.degree(Axis.TENSOR))
        elements += stays.moments // 8
        separate = separate or stays.masters > 0
    return elements * _element_bytes(plan, separate)


def _tensor_place(plan: Plan, rank: int) -> tuple[int, int]:
    return plan.grid.coordinate(rank, Axis.TENSOR), plan.grid.degree(Axis.TENSOR)


def _peak(plan: Plan, accelerator: Accelerator) -> float | None:
    """Return FLOP/s in the compute dtype: as stated, or else those of a card with the accelerator's name."""
    stated = accelerator.peak.get(plan.compute)
    if stated is not None:
        return quantity(stated, "FLOP/s")
    return None if accelerator.name is None else datasheet_peak(accelerator.name, plan.compute)


def _moved(plan: Plan) -> int:
    """Return the bytes that the optimizer reads and writes on the rank that holds most."""
    states = most_states(plan)
    return states.moments // 8 * _element_bytes(plan, states.masters > 0)


def _element_bytes(plan: Plan, separate: bool) -> int:
    """Return the bytes that a step of one element reads and writes: master and moments both ways, the gradient, and the
    new weight where that is not the master. separate: whether it is not."""
    return 2 * (4 + 8) + 4 + (plan.compute_bytes if separate else 0)
