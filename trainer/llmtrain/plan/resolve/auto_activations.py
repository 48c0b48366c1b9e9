"""How many activations stay on the device where others leave it: as many as its stated memory holds, after gathered
weights (`zero.resident`) have what they can use. No torch in here."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from llmtrain.cluster.memory import stated_memory
from llmtrain.plan.activation_offload import INPUTS_AHEAD
from llmtrain.plan.memory.memory_budget import passing_memory, role_memory, sure_bytes
from llmtrain.plan.per_rank.rank_activations import activation_memory, boundary_bytes, rank_counts
from llmtrain.plan.per_rank.roles import Role, roles
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.by_rank import ProgramsOf, programs_of


def with_most_staying(plan: Plan) -> Plan:
    """Return a plan in which as many activations stay as the stated memory holds, on each rank of the
    pipeline; the same plan where nothing leaves, or where no memory is stated."""
    limit = stated_memory(plan.cluster)
    if plan.activation_offload.tier == "none" or limit is None:
        return plan
    # What is gathered, and when, does not depend on what leaves.
    programs, every_role = programs_of(plan), roles(plan)
    by_pipeline_rank = (
        [role for role in every_role if role.pipeline == pipeline_rank]
        for pipeline_rank in range(len(plan.pipeline.stages))
    )
    return _staying(plan, [_most(plan, of_rank, programs, limit.size) for of_rank in by_pipeline_rank])


def _most(plan: Plan, of_rank: Sequence[Role], programs: ProgramsOf, limit: int) -> int:
    """Return the most activations that may stay on the ranks of some roles; INPUTS_AHEAD if even these exceed the
    limit. of_rank: the roles with one pipeline rank."""
    if any(sure_bytes(plan, role) > limit for role in of_rank):
        return INPUTS_AHEAD
    pipeline_degree = len(plan.pipeline.stages)
    # What does not depend on what leaves takes longest to plan.
    headrooms = [limit - role_memory(plan, role, programs(role.rank)).total + _bytes(plan, role) for role in of_rank]

    def exceeds(stay: int) -> bool:
        other = _staying(plan, [stay] * pipeline_degree)
        return any(_bytes(other, role) > headroom for role, headroom in zip(of_rank, headrooms, strict=True))

    # Group inputs that are offloaded at the same time, besides those that stay.
    every = INPUTS_AHEAD + max(rank_counts(plan, role.rank).regions for role in of_rank)
    # Where all stay, there are no buffers either.
    if not exceeds(every):
        return every
    # About as many as the headroom holds; the first number that exceeds it is one more than what fits.
    headroom = min(headroom - _bytes(plan, role) for role, headroom in zip(of_rank, headrooms, strict=True))
    guess = min(max(INPUTS_AHEAD, INPUTS_AHEAD + headroom // boundary_bytes(plan)), every - 1)
    low, high = (INPUTS_AHEAD, guess) if exceeds(guess) else (guess + 1, every)
    return max(INPUTS_AHEAD, bisect_left(range(high), True, lo=low, key=exceeds) - 1)


def _bytes(plan: Plan, role: Role) -> int:
    """Return the bytes of the device that depend on what leaves."""
    offloaded = activation_memory(plan, role.rank)
    elsewhere = offloaded.host + offloaded.buffers if plan.device == "cpu" else 0
    return sum(passing_memory(plan, role).values()) + elsewhere


def _staying(plan: Plan, stay: Sequence[int]) -> Plan:
    return replace(plan, activation_offload=replace(plan.activation_offload, stay=tuple(stay)))
