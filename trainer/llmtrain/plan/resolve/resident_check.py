"""Whether the memory of `zero.resident` is enough for the units that a rank uses at once. No torch in here."""

from dataclasses import replace

from llmtrain_data import units

from llmtrain.plan.per_rank.roles import roles
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.build import Programs, residency_units
from llmtrain.plan.program.spec import ProgramSpec


def resident_problem(plan: Plan) -> str | None:
    """Return an error if `zero.resident` is less than a rank needs, else None."""
    given = plan.sharding.resident
    # Programs take time to plan, and most budgets have room for all.
    short = [role.rank for role in roles(plan) if gathered_bytes(plan, role.rank) > given] if given else []
    needed = max((least_resident(plan, rank) for rank in short), default=0)
    if needed <= given:
        return None
    kept = "all units of a stage, which pipeline.schedule message-driven keeps gathered"
    what = kept if plan.pipeline.schedule.message_driven else "the units that a rank uses at once"
    return (
        f"zero.resident is {units.size(given)}; {what} take {units.size(needed)}: set zero.resident={needed} or more, "
        "or leave it out"
    )


def least_resident(plan: Plan, rank: int) -> int:
    """Return the fewest bytes of memory for gathered weights with which a rank of the run can step."""
    # With a budget of one element, only units in use are gathered.
    spec = replace(ProgramSpec.of(plan, rank), resident=1)
    return Programs(spec).step.weights * plan.compute_bytes


def gathered_bytes(plan: Plan, rank: int) -> int:
    """Return the bytes of all units that a rank gathers: the most that a step can use at once."""
    return plan.compute_bytes * sum(residency_units(ProgramSpec.of(plan, rank)).sizes.values())
