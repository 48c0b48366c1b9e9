"""The least time in which the links of each tier carry the bytes of a step, at the rates that the cluster file states.
No torch in here."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.layout import Axis
from llmtrain.cluster.tiers import Tier, rate_from
from llmtrain.cluster.topology import cluster_of
from llmtrain.plan.cost.step_traffic import RoleTraffic
from llmtrain.plan.per_rank.rank_units import rank_units
from llmtrain.plan.per_rank.roles import Role, roles
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.by_rank import ProgramsOf
from llmtrain.plan.program.step_calls import Call, StepCalls


@dataclass(frozen=True)
class WireTime:
    """The busiest links of a tier.

    per: whether each rank has the rate, or the ranks of a node share it. rank: the busiest rank, or the first rank of
    the busiest node. nbytes: bytes that this rank, or all ranks of this node, must send over the tier in a step. rate:
    bytes per second.
    """

    tier: str
    per: Literal["rank", "node"]
    rank: int
    nbytes: int
    rate: float

    @property
    def seconds(self) -> float:
        """The least time of a step."""
        return self.nbytes / self.rate

    def as_data(self) -> dict[str, Any]:
        """Return the time as plain data, for JSON; bytes, seconds."""
        return {
            "tier": self.tier,
            "per": self.per,
            "rank": self.rank,
            "bytes": self.nbytes,
            "bytes_per_s": self.rate,
            "seconds": self.seconds,
        }


def wire_times(plan: Plan, programs: ProgramsOf, traffic: Sequence[RoleTraffic]) -> list[WireTime]:
    """Return the time of each tier that carries something and whose rate is stated, fastest tier first. traffic: of all
    roles."""
    cluster, found = plan.cluster, list[WireTime]()
    if cluster is None:
        return []
    for first in _busy_nodes(plan, cluster, traffic):
        found += _of_node(plan, cluster, first, programs)
    by_tier = [[one for one in found if one.tier == tier.name] for tier in plan.tiers]
    return [max(same, key=lambda one: one.seconds) for same in by_tier if same]


def _busy_nodes(plan: Plan, cluster: Cluster, traffic: Sequence[RoleTraffic]) -> list[int]:
    """Return the first ranks of nodes: in each cluster its first one, and of all roles' first ranks those that send
    most over a tier."""
    nodes, firsts = reversed(range(0, plan.grid.world, cluster.node.ranks)), dict[Hashable, int]()
    firsts |= {cluster_of(cluster, first): first for first in nodes}
    for tier in plan.tiers:
        sent = {row.role.rank: sum(row.sent.get(tier.name, {}).values()) for row in traffic}
        # The last one stays, which sends most.
        firsts |= {(tier.name, cluster_of(cluster, rank)): rank for rank in sorted(sent, key=sent.__getitem__)}
    return sorted({rank - rank % cluster.node.ranks for rank in firsts.values()})


def _of_node(plan: Plan, cluster: Cluster, first: int, programs: ProgramsOf) -> Iterator[WireTime]:
    """Yield the times of a node. first: its first rank."""
    rates = {tier: rate for tier in plan.tiers if (rate := rate_from(cluster, tier, first)) is not None}
    if not rates:
        return
    ranks, every_role = range(first, min(first + cluster.node.ranks, plan.grid.world)), roles(plan)
    sent = {rank: _sent(plan, StepCalls(plan, rank, programs(_role_of(plan, every_role, rank).rank))) for rank in ranks}
    for tier, rate in rates.items():
        by_rank = [sent[rank][tier.name] for rank in ranks]
        nbytes = max(by_rank) if tier.per == "rank" else sum(by_rank)
        if nbytes:
            rank = ranks[by_rank.index(nbytes)] if tier.per == "rank" else first
            yield WireTime(tier.name, tier.per, rank, round(nbytes), rate)


def _sent(plan: Plan, calls: StepCalls) -> dict[str, float]:
    """Return the bytes that a rank must send in a step, by tier, without the step's few numbers."""
    found, inside = dict.fromkeys([tier.name for tier in plan.tiers], 0.0), dict[tuple[int, ...], int]()
    for call in chain(calls.sharding(), calls.tensor(), calls.messages(), calls.replicas()):
        if call.ranks not in inside:
            unit = _unit(plan.tiers, call.traffic.tier)
            inside[call.ranks] = sum(unit(other) == unit(calls.rank) for other in call.ranks)
        found[call.traffic.tier] += call.times * _leaving(call, inside[call.ranks])
    return found


def _unit(tiers: Sequence[Tier], name: str) -> Callable[[int], int]:
    """Return what has a link of its own into a tier: the number of a rank's node for a tier between nodes, else of its
    group in the next smaller tier."""
    unit: Callable[[int], int] = int
    for tier in tiers:
        if tier.name == name:
            break
        if tier.per == "rank":
            unit = tier.group
    return unit


def _leaving(call: Call, inside: int) -> float:
    """Return this rank's part of the bytes that must leave its node, or its smaller tier. inside: the ranks of the call
    in there.

    Ranks that gather or sum together in there send what they have in common once: a ring or a tree of all ranks sends
    no less. In an all-to-all, each has other bytes for each rank.
    """
    others, sharing = len(call.ranks) - inside, 1 if call.traffic.op == "all_to_all" else inside
    return call.traffic.sent * others / ((len(call.ranks) - 1) * sharing)


def _role_of(plan: Plan, every_role: Sequence[Role], rank: int) -> Role:
    """Return the role of a rank, one of `every_role`."""
    pipeline_rank, sizes = plan.grid.coordinate(rank, Axis.PIPELINE), [unit.numel for unit in rank_units(plan, rank)]
    return next(
        role for role in every_role if role.pipeline == pipeline_rank and [unit.numel for unit in role.units] == sizes
    )
