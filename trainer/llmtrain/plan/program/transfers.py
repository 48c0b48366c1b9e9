"""The collectives that a program's instructions start, lane by lane. No torch in here.

A lane runs its collectives one after another. Each level of a placement has one for gathers and one for reductions, so
that one unit's slow hop runs in parallel with another unit's fast hop.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.levels import Level
from llmtrain.model.tensors import UnitSpec
from llmtrain.plan.packed_format import PackedFormat
from llmtrain.plan.per_rank.rank_units import rank_units
from llmtrain.plan.per_rank.replica_groups import ReplicaGroup
from llmtrain.plan.per_rank.states import updates_apart
from llmtrain.plan.placement import Placement
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.instructions import Gather, Issue, Reduce
from llmtrain.plan.traffic import Traffic, gather_traffic, reduce_traffic

LaneKind = Literal["gather", "reduce", "flat"] | ReplicaGroup


@dataclass(frozen=True, slots=True)
class Lane:
    """A rank's collectives over one level. kind: flat is one hop over all levels of the weights; partial, stage and
    tied are the sums over replicas of these groups. axes: the axes of the placement. span: that of the level; for a sum
    over replicas, the number of the group's ranks."""

    kind: LaneKind
    axes: tuple[Axis, ...]
    span: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective of a unit."""

    unit: str
    lane: Lane
    traffic: Traffic


@dataclass(frozen=True, kw_only=True)
class UnitTraffic:
    """How the states of one unit are gathered and reduced. element_bytes: bytes of an element of the compute dtype.
    buffered_bytes: of gradients in a buffer. weights, secondary, gradients: packed formats, None for unpacked.
    tensor_parallel: whether tensor-parallel ranks share the unit."""

    spec: UnitSpec
    placement: Placement
    element_bytes: int
    buffered_bytes: int
    weights: PackedFormat | None
    secondary: PackedFormat | None
    gradients: PackedFormat | None
    tensor_parallel: bool = False

    def of(self, issue: Issue) -> Iterator[Transfer]:
        """Yield the collectives of an instruction, in order."""
        if isinstance(issue, Gather):
            yield from self.gather(issue)
        elif isinstance(issue, Reduce):
            yield from self.reduce(issue)

    def gather(self, gather: Gather) -> Iterator[Transfer]:
        """Yield the collectives of a gather."""
        degrees = self.placement.degrees
        outer, packing = (degrees.secondary, self.secondary) if gather.secondary else (degrees.weights, self.weights)
        purpose = "secondary" if gather.secondary else "weights"
        yield from self._gather(purpose, 1, outer, self._padded, self.element_bytes, packing)

    def reduce(self, reduce: Reduce) -> Iterator[Transfer]:
        """Yield the collectives of a reduction."""
        degrees, padded = self.placement.degrees, self._padded
        if reduce.offset is not None:
            yield from self._reduce("gradients", 1, degrees.gradients, padded, self.sent_bytes(0, buffered=True))
        if reduce.last:
            owned = padded // degrees.optimizer
            yield from self._reduce("gradients", degrees.gradients, degrees.optimizer, padded // degrees.gradients)
            yield from self._reduce("replicas", degrees.optimizer, degrees.ranks, owned)
            yield from self._gather("replicas", degrees.optimizer, degrees.ranks, owned, self.wire_bytes, None)

    def update(self) -> Iterator[Transfer]:
        """Yield the collectives of the update after an optimizer step."""
        degrees, numel = self.placement.degrees, self._padded // self.placement.degrees.weights
        yield from self._gather("update", degrees.weights, degrees.optimizer, numel, self.element_bytes, self.weights)

    def lanes(self, inner: int, outer: int) -> list[tuple[Lane, Level]]:
        """Return the lanes that gather a state from degree `outer` to degree `inner`, and their levels, fastest
        first."""
        flat = self._flat(inner, outer)
        levels = self._levels(inner, outer) if flat is None else [flat]
        kind: LaneKind = "gather" if flat is None else "flat"
        return [(Lane(kind, self.placement.axes, level.span), level) for level in levels]

    @property
    def sum_bytes(self) -> int:
        """Bytes of an element of the sums of gradients."""
        return self.placement.gradient_bytes(self.element_bytes)

    @property
    def wire_bytes(self) -> int:
        """Bytes of an element of a sum of gradients that is sent."""
        return self.placement.wire_bytes(self.element_bytes)

    def sent_bytes(self, hop_index: int, buffered: bool) -> int:
        """Return the bytes of an element that a reduction sends over its hop number `hop_index`. buffered: whether it
        begins with gradients in a buffer."""
        return min(self.wire_bytes, self.buffered_bytes) if buffered and hop_index == 0 else self.wire_bytes

    def reduced_bytes(self, buffered: bool) -> int:
        """Return the bytes of an element of gradients before their reduction. buffered: whether they are in a
        buffer."""
        return self.buffered_bytes if buffered else self.sum_bytes

    @property
    def replicated_bytes(self) -> int:
        """Bytes of the TP-replicated parameters in the compute dtype."""
        return self.spec.replicated_numel * self.element_bytes

    @property
    def replicated_lanes(self) -> list[tuple[Lane, Level]]:
        """The lanes of the sums that update TP-replicated parameters, which are not packed; none if nothing is."""
        packed = (self.weights or self.secondary) is not None
        apart = updates_apart(self.spec, self.placement.degrees, packed, self.tensor_parallel)
        return self.lanes(1, self.placement.degrees.optimizer) if apart else []

    @property
    def _padded(self) -> int:
        return self.placement.padded(self.spec.numel)

    def _gather(
        self, purpose: str, inner: int, outer: int, numel: int, element_bytes: int, packing: PackedFormat | None
    ) -> Iterator[Transfer]:
        lanes = self.lanes(inner, outer)
        found = gather_traffic(purpose, [level for _, level in lanes], numel, element_bytes, packing)
        for (lane, _), traffic in zip(reversed(lanes), found, strict=True):
            yield Transfer(self.spec.name, lane, traffic)

    def _reduce(self, purpose: str, inner: int, outer: int, numel: int, first: int | None = None) -> Iterator[Transfer]:
        """first: bytes of an element on the first hop, if it is no sum."""
        levels, wire = self._levels(inner, outer), self.wire_bytes
        found = reduce_traffic(purpose, levels, numel, (first or wire, wire), self.gradients)
        for level, traffic in zip(levels, found, strict=True):
            yield Transfer(self.spec.name, Lane("reduce", self.placement.axes, level.span), traffic)

    def _levels(self, inner: int, outer: int) -> list[Level]:
        return [level for level in self.placement.levels if inner < level.span <= outer]

    def _flat(self, inner: int, outer: int) -> Level | None:
        degree = self.placement.degrees.weights
        if self.placement.hierarchical or degree == 1 or (inner, outer) != (1, degree):
            return None
        return Level(1, degree, next(level.tier for level in self.placement.levels if level.span == degree))


def unit_traffic(plan: Plan, rank: int) -> list[UnitTraffic]:
    """Return how the units of a rank of the run are gathered and reduced, in the order of the model."""
    quantization = plan.sharding.quantization

    def packed(bits: int) -> PackedFormat | None:
        return PackedFormat(bits, quantization.block) if bits else None

    return [
        UnitTraffic(
            spec=spec,
            placement=plan.sharding.placements[spec.name],
            element_bytes=plan.compute_bytes,
            buffered_bytes=plan.buffered_gradient_bytes,
            weights=packed(quantization.weights),
            secondary=packed(quantization.secondary),
            gradients=packed(quantization.gradients),
            tensor_parallel=plan.grid.degree(Axis.TENSOR) > 1,
        )
        for spec in rank_units(plan, rank)
    ]


def lane_members(grid: Layout, rank: int, placement: Placement, lane: Lane) -> tuple[int, ...]:
    """Return the ranks of a lane's group that `rank` is in, which differ in one digit of their data rank."""
    line, data_rank = grid.group_of(rank, *placement.axes), grid.coordinate(rank, *placement.axes)
    return tuple(line[other] for other in _level(placement, lane).members(data_rank))


def _level(placement: Placement, lane: Lane) -> Level:
    if lane.kind == "flat":
        return Level(1, lane.span, "")
    return next(level for level in placement.levels if level.span == lane.span)
