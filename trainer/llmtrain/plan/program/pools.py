"""The buffers of a rank's collectives and messages, which are allocated once, before the first step. No torch in here.

Gathered weights and unsharded gradients lie in buffer pools of their own, which the program plans.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.tiers import node_ranks
from llmtrain.plan.collective_buffers import CollectiveBuffers, SizedCollective, backend_of
from llmtrain.plan.per_rank.message_buffers import ring_bytes
from llmtrain.plan.per_rank.replica_groups import ReplicaGroup, replica_groups
from llmtrain.plan.pipeline.actions import Kind
from llmtrain.plan.placement import Placement
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.posted_receives import posted_bytes
from llmtrain.plan.program.tensor_calls import TensorCalls
from llmtrain.plan.program.transfers import UnitTraffic, lane_members, unit_traffic
from llmtrain.plan.program.workspaces import InFlightBuffers, LaneBuffers, in_flight_buffers, lane_buffers

GroupName = ReplicaGroup | Literal["tensor"]
"""The groups of ranks that hold the same parameters, and of those that compute with parts of the same layers."""


@dataclass(frozen=True)
class Pools:
    """The buffers of a rank. in_flight: the buffers of gathers and reductions. lanes: those of the hops of each
    placement. groups: those of the other groups' collectives."""

    in_flight: InFlightBuffers = field(default_factory=InFlightBuffers)
    lanes: Mapping[Placement, LaneBuffers] = field(default_factory=dict)
    groups: Mapping[GroupName, CollectiveBuffers] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, rank: int, programs: Programs) -> "Pools":
        """Return the buffers of a rank of the run. programs: the rank's."""
        units = unit_traffic(plan, rank)
        placements = dict.fromkeys(plan.sharding.placements.values())
        return cls(
            in_flight=in_flight_buffers(units, programs),
            lanes={one: lane_buffers(one, units, programs) for one in placements},
            groups={name: buffers for name, _, buffers in _groups(plan, rank, units)},
        )


def pool_bytes(plan: Plan, rank: int, programs: Programs) -> dict[str, int]:
    """Return the bytes of a rank's buffers by what uses them. CPUs of one node are taken to share memory."""
    pools, node, units = Pools.of(plan, rank, programs), node_ranks(plan.tiers), unit_traffic(plan, rank)
    hops = groups = 0
    for placement, lanes in pools.lanes.items():
        for lane, buffers in lanes.items():
            hops += buffers.nbytes(backend_of(plan.device, lane_members(plan.grid, rank, placement, lane), node))
    for _, members, buffers in _groups(plan, rank, units):
        groups += buffers.nbytes(backend_of(plan.device, members, node))
    return {
        "in_flight": pools.in_flight.nbytes,
        "hops": hops,
        "groups": groups,
        "messages": ring_bytes(plan, rank),
        "receives": posted_bytes(plan, rank),
    }


_Group = tuple[GroupName, Sequence[int], CollectiveBuffers]


def _groups(plan: Plan, rank: int, units: Sequence[UnitTraffic]) -> Iterator[_Group]:
    """Yield the name, the ranks and the buffers of each group of the rank besides its hops."""
    tensor, groups = plan.grid.group_of(rank, Axis.TENSOR), replica_groups(plan, rank)
    if len(tensor) > 1:
        yield _group("tensor", tensor, _tensor(plan, rank))
    if "partial" in groups:
        partial = [_sum(_partial(one)) for one in units if one.replicated_bytes]
        yield _group("partial", groups["partial"], partial)
    if "stage" in groups:
        yield _group("stage", groups["stage"], [_sum(averaged_bytes(units))])
    if "tied" in groups:
        embedding = next(one for one in units if one.spec.name == "embedding")
        yield _group("tied", groups["tied"], [_sum(tied_bytes(embedding))])


def averaged_bytes(units: Sequence[UnitTraffic]) -> int:
    """Return the bytes of the gradients of TP-replicated parameters that a stage averages, in fp32."""
    return 4 * sum(one.spec.replicated_numel for one in units)


def tied_bytes(embedding: UnitTraffic) -> int:
    """Return the bytes of a tied embedding's gradients that a rank sums with those of the other copy."""
    placement = embedding.placement
    return embedding.sum_bytes * placement.padded(embedding.spec.numel) // placement.degrees.optimizer


def _group(name: GroupName, members: Sequence[int], collectives: Iterable[SizedCollective]) -> _Group:
    return name, members, CollectiveBuffers(len(members), frozenset(collectives), sequential=False)


def _tensor(plan: Plan, rank: int) -> Iterator[SizedCollective]:
    calls = TensorCalls(plan)
    for layout in plan.stages_of(rank):
        for kind in Kind:
            for op, size in calls.of(kind, layout, defers=False):
                yield SizedCollective(op, size, plan.compute_bytes)


def _partial(unit: UnitTraffic) -> int:
    """Bytes of the sum of a unit's TP-replicated gradients."""
    element_bytes = unit.reduced_bytes(unit.placement.degrees.gradients > 1)
    return unit.replicated_bytes // unit.element_bytes * element_bytes


def _sum(size: int) -> SizedCollective:
    return SizedCollective("all_reduce", size)
