"""The least time of a step that a described accelerator and its host allow. No torch in here."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from llmtrain.cluster.description import Accelerator
from llmtrain.cluster.layout import Axis
from llmtrain.cluster.quantity import quantity
from llmtrain.plan.facts import Device
from llmtrain.plan.flops import datasheet_peak, flops_per_token
from llmtrain.plan.near_volumes import socket_of, volume_shares
from llmtrain.plan.plan import Plan
from llmtrain.plan.rank_buckets import rank_buckets
from llmtrain.plan.rank_units import rank_units
from llmtrain.plan.roles import roles
from llmtrain.plan.states import most_states, state_bytes
from llmtrain.plan.volume_traffic import MovedOf


@dataclass(frozen=True)
class LeastTime:
    """Lower bounds in seconds; None where the description states no speed.

    compute: of the products of all microbatches, at the accelerator's peak. optimizer: of the optimizer's reads and
    writes, at the bandwidth of the accelerator's memory. host: of those of offloaded states by the CPUs of a node, at
    the bandwidth of the host's memory. volumes: of all that a node's ranks read from and write to its volumes, both at
    once, at their bandwidth. link: of the gradients and weights of offloaded states, or of the states themselves where
    the device steps them, in the direction that takes longer, at the bandwidth of the accelerator's link to the host.
    """

    compute: float | None
    optimizer: float | None
    host: float | None = None
    volumes: float | None = None
    link: float | None = None


def least_time(plan: Plan, device: Device, moved: MovedOf) -> LeastTime:
    """Return the lower bounds of a step's times. device: what computes. moved: what ranks move from and to volumes."""
    accelerator = plan.cluster.accelerator if plan.cluster else None
    host, volumes = _host_seconds(plan, device), _volume_seconds(plan, moved)
    if accelerator is None:
        return LeastTime(None, None, host, volumes)
    peak, rate = _peak(plan, accelerator), accelerator.bandwidth
    flops = flops_per_token(plan.model, plan.batch.sequence_length) * plan.batch.tokens / plan.grid.world
    return LeastTime(
        None if peak is None else flops / peak,
        None if rate is None else _moved(plan) / quantity(rate, "byte/s"),
        host,
        volumes,
        _link_seconds(plan, accelerator, device),
    )


def step_threads(plan: Plan) -> int | None:
    """Return the threads with which each rank of a GPU steps offloaded states: its even share of the host's cores. None
    where the description does not state them, or where the CPU steps nothing."""
    host = plan.cluster.node.host if plan.cluster else None
    offload = plan.sharding.offload
    if plan.cluster is None or host is None or host.cores is None or not offload.share or offload.on_device:
        return None
    return max(1, host.cores // plan.cluster.node.ranks)


def _host_seconds(plan: Plan, device: Device) -> float | None:
    host = plan.cluster.node.host if plan.cluster else None
    if host is None or host.bandwidth is None:
        return None
    moved = _most_of_a_node(plan, lambda rank: _stepped_bytes(plan, rank, device))
    return moved / quantity(host.bandwidth, "byte/s") if moved else None


def _link_seconds(plan: Plan, accelerator: Accelerator, device: Device) -> float | None:
    if accelerator.host_link is None or device == "cpu":
        return None
    offload = plan.sharding.offload
    moved = max(
        sum(
            (one.end - one.start) * (4 * one.states if offload.on_device else plan.gradient_bytes)
            for one in rank_buckets(plan, role.rank)
        )
        for role in roles(plan)
    )
    return moved / quantity(accelerator.host_link, "byte/s") if moved else None


def _volume_seconds(plan: Plan, moved: MovedOf) -> float | None:
    rates = {one.path: one.bandwidth for one in plan.cluster.node.nvme} if plan.cluster else {}
    used = [one.path for one in volume_shares(plan)]
    known = {path: quantity(rate, "byte/s") for path in used if (rate := rates.get(path)) is not None}
    if not used or len(known) < len(used):
        return None
    return max(
        _most_of_a_node(plan, partial(_moved_on, moved, path, way)) / rate
        for path, rate in known.items()
        for way in (0, 1)
    )


def _moved_on(moved: MovedOf, path: str, way: int, rank: int) -> int:
    """Return the bytes that a rank reads from a volume (way 0), or writes to it (1)."""
    return sum(of_volume[path][way] for of_volume in moved(rank).values() if path in of_volume)


def _most_of_a_node(plan: Plan, of_rank: Callable[[int], int]) -> int:
    """Return the most bytes of all ranks of a node together. of_rank: bytes of a rank."""
    if plan.cluster is None:
        return 0
    size, grid = plan.cluster.node.ranks, plan.grid
    alike: dict[tuple[int, ...], int] = {}

    def of_place(rank: int) -> int:
        # Data-parallel ranks on the same socket are alike.
        place = *(grid.coordinate(rank, axis) for axis in (Axis.PIPELINE, Axis.TENSOR)), socket_of(plan, rank)
        if place not in alike:
            alike[place] = of_rank(rank)
        return alike[place]

    firsts = {role.rank // size * size for role in roles(plan)}
    return max(sum(map(of_place, range(first, min(first + size, grid.world)))) for first in firsts)


def _stepped_bytes(plan: Plan, rank: int, device: Device) -> int:
    """Return the bytes that the host's CPU reads and writes to step the states of a rank."""
    outside = [] if device != "cpu" and plan.sharding.offload.on_device else rank_buckets(plan, rank)
    elements = sum(one.end - one.start for one in outside)
    separate = any(one.states == 3 for one in outside)
    if device == "cpu":
        units = rank_units(plan, rank)
        stays = state_bytes(units, plan.sharding, plan.compute_bytes, plan.grid.degree(Axis.TENSOR))
        elements += stays.moments // 8
        separate = separate or stays.masters > 0
    return elements * _element_bytes(plan, separate)


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
    return 2 * (4 + 8) + plan.gradient_bytes + (plan.compute_bytes if separate else 0)
