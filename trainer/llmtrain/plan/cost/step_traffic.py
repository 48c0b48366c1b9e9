"""The bytes that ranks send in an optimizer step, by link tier and purpose. No torch in here."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from llmtrain.plan.per_rank.roles import Role, roles
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.by_rank import ProgramsOf
from llmtrain.plan.program.step_calls import StepCalls

PURPOSES: tuple[str, ...] = (
    "weights",
    "secondary",
    "gradients",
    "replicas",
    "update",
    "tensor",
    "replicated",
    "pipeline",
    "scalars",
)
"""Purposes of collectives and messages. weights, secondary: gathers of the weights, from the shards or from the
secondary copy. gradients: reductions to the optimizer's shards. replicas: sums over the copies of a shard. update:
gathers of the stepped weights. tensor: inside of layers. replicated: sums of the gradients of parameters that
tensor-parallel ranks or two stages have. pipeline: messages between stages. scalars: the step's numbers."""


@dataclass(frozen=True)
class RoleTraffic:
    """What the first rank of a role sends to others in a step that is not logged: bytes by tier, fastest first, and
    purpose. An all-reduce counts as a ring."""

    role: Role
    sent: Mapping[str, Mapping[str, int]]


def step_traffic(plan: Plan, programs: ProgramsOf) -> list[RoleTraffic]:
    """Return the traffic of each role, in the order of the pipeline."""
    return [RoleTraffic(role, _sent(plan, role.rank, programs)) for role in roles(plan)]


def _sent(plan: Plan, rank: int, programs: ProgramsOf) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {tier.name: Counter() for tier in plan.tiers}
    for call in StepCalls(plan, rank, programs(rank)).all():
        found[call.traffic.tier][call.traffic.purpose] += call.times * call.traffic.sent
    return {tier: {name: sent[name] for name in PURPOSES if sent[name]} for tier, sent in found.items() if sent.total()}
