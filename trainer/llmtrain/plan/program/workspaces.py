"""The buffers that gathers and reductions in flight need, from how units are gathered and reduced. No torch in here.

Each gather, and each reduction, in flight has a workspace of its own, which the largest unit fits. So has each lane,
whose collectives run one after another.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llmtrain.cluster.levels import Level, shard_range
from llmtrain.plan.collective_buffers import CollectiveBuffers, SizedCollective, most
from llmtrain.plan.packed_format import PackedFormat
from llmtrain.plan.pipeline.actions import Kind
from llmtrain.plan.placement import Placement
from llmtrain.plan.program.build import Programs, serves_secondary
from llmtrain.plan.program.instructions import Gather, Reduce
from llmtrain.plan.program.transfers import Lane, Transfer, UnitTraffic

NamedSize = tuple[str, int]


@dataclass(frozen=True)
class InFlightBuffers:
    """The workspaces of what is in flight. weights, gradients: bytes of each buffer, by name, of one gather's and of
    one reduction's workspace. count: gathers, and reductions, in flight at the same time."""

    weights: Mapping[str, int] = field(default_factory=dict)
    gradients: Mapping[str, int] = field(default_factory=dict)
    count: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all workspaces."""
        return self.count * (sum(self.weights.values()) + sum(self.gradients.values()))


LaneBuffers = Mapping[Lane, CollectiveBuffers]
"""What the collectives of each lane of a placement need."""


def in_flight_buffers(units: Sequence[UnitTraffic], programs: Programs) -> InFlightBuffers:
    """Return the workspaces of a rank's gathers and reductions. units: its own."""
    gathers = (item for unit in units for item in _gather_workspace(unit, programs))
    reductions = (item for unit in units for item in _reduction_workspace(unit))
    # One more than there are hops, so that a unit starts while others are on each hop.
    return InFlightBuffers(most(gathers), most(reductions), max(len(unit.placement.levels) for unit in units) + 1)


def lane_buffers(placement: Placement, units: Sequence[UnitTraffic], programs: Programs) -> LaneBuffers:
    """Return what the lanes of a placement need on a rank. units: all units of the rank."""
    found: dict[Lane, set[SizedCollective]] = {}
    for unit in units:
        if unit.placement == placement:
            for lane, collective in _collectives(unit, programs):
                found.setdefault(lane, set()).add(collective)
    return {
        lane: CollectiveBuffers(level.radix, frozenset(found.get(lane, ())), in_order=_in_order(placement, lane))
        for lane, level in lanes_of(placement)
    }


def lanes_of(placement: Placement) -> list[tuple[Lane, Level]]:
    """Return every lane of a placement, whether or not a unit uses it, and its level."""
    found = [
        (Lane(kind, placement.axes, level.span), level) for kind in ("gather", "reduce") for level in placement.levels
    ]
    degree = placement.degrees.weights
    if not placement.hierarchical and degree > 1:
        tier = next(level.tier for level in placement.levels if level.span == degree)
        found.append((Lane("flat", placement.axes, degree), Level(1, degree, tier)))
    return found


def flat_order(placement: Placement) -> list[int]:
    """Return the position of each rank's weight shard, for the ranks that one hop over all levels joins."""
    degree = placement.degrees.weights
    return [shard_range(placement.levels, data_rank, degree, degree)[0] for data_rank in range(degree)]


def _in_order(placement: Placement, lane: Lane) -> bool:
    return lane.kind != "flat" or flat_order(placement) == list(range(lane.span))


def _gather_workspace(unit: UnitTraffic, programs: Programs) -> Iterator[NamedSize]:
    degrees, padded = unit.placement.degrees, unit.placement.padded(unit.spec.numel)
    for gather in _gathers(unit, programs):
        rows, packing = (degrees.secondary, unit.secondary) if gather.secondary else (degrees.weights, unit.weights)
        if rows > 1:
            yield "packed", _packed(rows, padded // rows, packing)
    if degrees.optimizer > degrees.weights:
        yield "packed", _packed(degrees.optimizer // degrees.weights, padded // degrees.optimizer, unit.weights)


def _packed(rows: int, numel: int, packing: PackedFormat | None) -> int:
    return rows * packing.row_bytes(numel) if packing else 0


def _reduction_workspace(unit: UnitTraffic) -> Iterator[NamedSize]:
    """Yield the fp32 sums behind each hop, and the optimizer shard's in the dtype that is sent."""
    degrees, numel = unit.placement.degrees, unit.placement.padded(unit.spec.numel)
    for level in unit.placement.levels:
        numel //= level.radix
        yield f"sum over {level.span}", 4 * numel
    padded, moves = unit.placement.padded(unit.spec.numel), unit.placement.moves_gradients
    if unit.placement.hops_after_sum:
        if unit.wire_bytes < unit.sum_bytes or moves:
            yield "owned gradient", padded // degrees.optimizer * unit.wire_bytes
        if moves:
            yield "sum", 4 * padded // degrees.gradients


def _collectives(unit: UnitTraffic, programs: Programs) -> Iterator[tuple[Lane, SizedCollective]]:
    shared = unit.weights is None and not unit.placement.moves_weights
    direct = shared and len(unit.lanes(1, unit.placement.degrees.weights)) == 1
    for gather in _gathers(unit, programs):
        yield from _sized(unit.gather(gather), shards=direct and not gather.secondary)
    yield from _sized(unit.update())
    for reduce in _reductions(unit):
        from_compute_dtype = _hops_from_compute_dtype(unit, reduce)
        for hop_index, transfer in enumerate(unit.reduce(reduce)):
            element = unit.sent_bytes(hop_index, reduce.offset is not None)
            yield from _sized([transfer], element, converted=element < 4 and hop_index not in from_compute_dtype)
    for lane, _ in unit.replicated_lanes:
        yield lane, SizedCollective("all_reduce", unit.replicated_bytes)


def _hops_from_compute_dtype(unit: UnitTraffic, reduce: Reduce) -> set[int]:
    """Return the numbers of a reduction's hops whose input is in the compute dtype already: unsharded gradients, or
    sums over all microbatches. The input of any other hop is the fp32 sum of the hop before."""
    degree = unit.placement.degrees.gradients
    whole = {0} if reduce.offset is not None and unit.buffered_bytes == unit.element_bytes else set()
    if unit.sum_bytes > unit.element_bytes:
        return whole
    return {*whole, sum(level.span <= degree for level in unit.placement.levels)}


def _sized(
    transfers: Iterable[Transfer], element: int = 1, shards: bool = False, converted: bool = False
) -> Iterator[tuple[Lane, SizedCollective]]:
    for transfer in transfers:
        traffic = transfer.traffic
        if traffic.op == "all_gather":
            yield transfer.lane, SizedCollective("all_gather", traffic.size, shards=shards)
        elif traffic.packed:
            yield transfer.lane, SizedCollective("all_to_all", traffic.size)
        else:
            yield transfer.lane, SizedCollective("reduce_scatter", traffic.size, element, converted=converted)


def _gathers(unit: UnitTraffic, programs: Programs) -> list[Gather]:
    """Return a gather from each source that a unit's weights come from."""
    name = unit.spec.name
    if not programs.spec.is_gathered(name):
        return []
    found = [Gather(name, 0)]
    # An evaluation of several groups of microbatches gathers again for each group.
    copied = programs.spec.degrees[name].secondary > 0
    if copied and (name in programs.from_secondary or serves_secondary(programs.spec, name, Kind.F)):
        found.append(Gather(name, 0, secondary=True))
    return found


def _reductions(unit: UnitTraffic) -> list[Reduce]:
    degrees, name = unit.placement.degrees, unit.spec.name
    offset = 0 if degrees.gradients > 1 else None
    return [Reduce(name, offset, first=True, last=True)] if degrees.ranks > 1 else []
