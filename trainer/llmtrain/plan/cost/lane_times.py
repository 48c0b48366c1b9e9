"""Least times of the lanes that move and step offloaded states and activations: each volume and the host link in both
directions, AdamW, and sums of gradients. Each is computed from the bytes of a step and a described rate. No torch in
here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.quantity import quantity
from llmtrain.plan.cost.gradient_sums import summed_on_host
from llmtrain.plan.cost.link_traffic import link_traffic
from llmtrain.plan.cost.optimizer_traffic import stepped_by_cpu, stepped_by_device
from llmtrain.plan.cost.volume_traffic import MovedOf, first_like
from llmtrain.plan.per_rank.near_volumes import socket_of
from llmtrain.plan.per_rank.roles import roles
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.by_rank import ProgramsOf

LINK, CPU, DEVICE = "host link", "AdamW on the CPU", "AdamW on the device"
SUMS = "sums of gradients on the CPU"


@dataclass(frozen=True, kw_only=True)
class LaneTime:
    """A volume (its folder is the name), the host link, AdamW, or the sums of gradients. Each does one thing at a time
    in each way.

    nbytes: bytes that all ranks which share it move in a step. ranks: number of these ranks. rate: bytes per second;
    None if the cluster file does not state it. key: the key of the cluster file that states the rate.
    """

    name: str
    way: Literal["read", "written", "to the host", "to the device", "read and written"]
    nbytes: int
    ranks: int
    rate: float | None
    key: str

    @property
    def seconds(self) -> float | None:
        """The least time of a step."""
        return None if self.rate is None else self.nbytes / self.rate

    def as_data(self) -> dict[str, Any]:
        """Return the lane as plain data, for JSON; bytes, seconds."""
        return {
            "lane": self.name,
            "way": self.way,
            "ranks": self.ranks,
            "bytes": self.nbytes,
            "bytes_per_s": self.rate,
            "seconds": self.seconds,
            "rate_key": self.key,
        }


def lane_times(plan: Plan, programs: ProgramsOf, moved: MovedOf) -> list[LaneTime]:
    """Return the lanes that move something in a step. programs: of the ranks. moved: what they move from and to
    volumes."""
    found = [*_volumes(plan, moved), *_link(plan, programs), *_steps(plan), _sums(plan, programs)]
    return [lane for lane in found if lane.nbytes]


def busiest(found: Sequence[LaneTime], *names: str) -> float | None:
    """Return the most seconds of the lanes with these names; None if there are none, or if a rate is not known."""
    seconds = [lane.seconds for lane in found if lane.name in names]
    known = [one for one in seconds if one is not None]
    return max(known, default=None) if len(known) == len(seconds) else None


def volume_paths(plan: Plan) -> list[str]:
    """Return the folders of files, one of each volume."""
    return list(dict.fromkeys((*plan.sharding.offload.paths, *plan.activation_offload.paths)))


@dataclass(frozen=True)
class DescribedRates:
    """The rates that a cluster file states, in bytes per second; None if it does not. volumes: rate of each volume in
    each direction, by folder. link: rate between a GPU and its host, each way. host: bandwidth of the host's memory.
    device: bandwidth of a device's memory."""

    volumes: Mapping[str, float | None]
    link: float | None
    host: float | None
    device: float | None


def described_rates(plan: Plan) -> DescribedRates:
    """Return the rates of a plan's description."""
    if plan.cluster is None:
        return DescribedRates({}, None, None, None)
    node, accelerator = plan.cluster.node, plan.cluster.accelerator
    return DescribedRates(
        {one.path: _rate(one.bandwidth) for one in node.nvme},
        _rate(accelerator.host_link) if accelerator else None,
        _rate(node.host.bandwidth) if node.host else None,
        _rate(accelerator.bandwidth) if accelerator else None,
    )


def _volumes(plan: Plan, moved: MovedOf) -> Iterator[LaneTime]:
    rates = described_rates(plan).volumes
    for path in volume_paths(plan):
        for way_index, way in enumerate(("read", "written")):
            nbytes, ranks = _most_of_a_node(plan, partial(_moved_on, moved, path, way_index))
            key = f"node.nvme of {path}"
            yield LaneTime(name=path, way=way, nbytes=nbytes, ranks=ranks, rate=rates.get(path), key=key)  # type: ignore[arg-type]


def _link(plan: Plan, programs: ProgramsOf) -> Iterator[LaneTime]:
    copied = [link_traffic(plan, role.rank, programs(role.rank)).values() for role in roles(plan)]
    rate = described_rates(plan).link
    for way_index, way in enumerate(("to the host", "to the device")):
        nbytes = max(sum(both[way_index] for both in of_rank) for of_rank in copied)
        yield LaneTime(name=LINK, way=way, nbytes=nbytes, ranks=1, rate=rate, key="accelerator.host_link")  # type: ignore[arg-type]


def _steps(plan: Plan) -> Iterator[LaneTime]:
    rates = described_rates(plan)
    nbytes, ranks = _most_of_a_node(plan, lambda rank: stepped_by_cpu(plan, rank).nbytes)
    yield LaneTime(
        name=CPU, way="read and written", nbytes=nbytes, ranks=ranks, rate=rates.host, key="node.host.bandwidth"
    )
    nbytes = max(stepped_by_device(plan, role.rank).nbytes for role in roles(plan))
    yield LaneTime(
        name=DEVICE, way="read and written", nbytes=nbytes, ranks=1, rate=rates.device, key="accelerator.bandwidth"
    )


def _sums(plan: Plan, programs: ProgramsOf) -> LaneTime:
    nbytes, ranks = _most_of_a_node(plan, lambda rank: summed_on_host(plan, rank, programs(first_like(plan, rank))))
    rate = described_rates(plan).host
    return LaneTime(name=SUMS, way="read and written", nbytes=nbytes, ranks=ranks, rate=rate, key="node.host.bandwidth")


def _rate(text: str | None) -> float | None:
    return None if text is None else quantity(text, "byte/s")


def _moved_on(moved: MovedOf, path: str, way: int, rank: int) -> int:
    """Return the bytes that a rank reads from a volume (way 0), or writes to it (1)."""
    return sum(of_volume[path][way] for of_volume in moved(rank).values() if path in of_volume)


def _most_of_a_node(plan: Plan, of_rank: Callable[[int], int]) -> tuple[int, int]:
    """Return the most bytes of all ranks of a node together, and their number. Without a description, each rank has a
    node of its own. of_rank: bytes of a rank."""
    size, grid = plan.cluster.node.ranks if plan.cluster else 1, plan.grid
    by_coordinates: dict[tuple[int, ...], int] = {}

    def bytes_of(rank: int) -> int:
        # Data-parallel ranks on the same socket move equal bytes.
        coordinates = *(grid.coordinate(rank, axis) for axis in (Axis.PIPELINE, Axis.TENSOR)), socket_of(plan, rank)
        if coordinates not in by_coordinates:
            by_coordinates[coordinates] = of_rank(rank)
        return by_coordinates[coordinates]

    firsts = {role.rank // size * size for role in roles(plan)}
    nodes = [range(first, min(first + size, grid.world)) for first in firsts]
    return max((sum(map(bytes_of, node)), len(node)) for node in nodes)
