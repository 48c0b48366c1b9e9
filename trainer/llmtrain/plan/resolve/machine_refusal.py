"""A run that needs more memory than this machine has: why, and the change that makes it fit. No torch in here."""

from collections.abc import Iterator
from dataclasses import replace

from llmtrain_data import units

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.memory import machine_memory, usable_memory
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import host_memory, memory_budget, sure_bytes
from llmtrain.plan.per_rank.roles import Role, roles
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.changes import Change, changes, file_changes, host_changes
from llmtrain.plan.resolve.refusal import planned
from llmtrain.recipe.schema import Recipe

# The shortest sequence that a refusal advises.
SHORTEST = 128


def machine_refusal(recipe: Recipe, facts: Facts, plan: Plan) -> str | None:
    """Return a sentence on why a plan's ranks do not fit this machine's memory, and on what to change; None if they
    fit. Ranks on GPUs need it for what they offload, and for checkpoints; they may take its `usable_memory`, also
    where a description states more.

    The sentence names the first change that makes it fit: on GPUs those of `host_changes`, then those of
    `changes`, then a shorter sequence, then those of `file_changes`.
    """
    # Memory that a GPU copies from and to is pinned.
    whole = machine_memory(swap=plan.device == "cpu")
    there = whole if plan.device == "cpu" else usable_memory(whole)
    needed = machine_bytes(plan, facts, there)
    if needed <= there:
        return None
    ranks = facts.node_ranks
    memory = "memory" if plan.device == "cpu" else "memory besides that of its GPUs"
    said = (
        f"the run needs {units.size(needed)} of {memory}{f' for {ranks} ranks' if ranks > 1 else ''}, but this machine "
        f"has {units.size(whole)}{'' if there == whole else f', of which ranks may take {units.size(there)}'}"
    )
    first = host_changes(recipe, plan) if plan.device == "cuda" else ()
    for change in (*first, *changes(recipe, plan), *_shorter(recipe, plan), *file_changes(recipe, plan)):
        changed = planned(change.recipe, facts)
        if changed is None or (after := machine_bytes(changed, facts, there)) > there:
            continue
        # What no longer rests there may not fit the GPU.
        if plan.device != "cuda" or not memory_budget(changed).excess:
            return f"{said}; {change.advice}, which needs {units.size(after)} (--force takes it as it is)"
    shards = "zero.stage, parallel, " if facts.world > 1 else ""
    return (
        f"{said}; no change of {shards}train.microbatch, activation_checkpointing, offload or "
        "data.sequence_length makes it fit, so take a smaller model (--force takes it as it is)"
    )


def machine_bytes(plan: Plan, facts: Facts, enough: int) -> int:
    """Return the planned bytes of the ranks on the machine whose ranks take most. enough: if more are taken without the
    programs' memory, which takes long to plan for many microbatches, only those are returned."""
    if plan.device == "cuda":
        return _fullest(plan, facts, {role: sum(host_memory(plan, role).values()) for role in roles(plan)})
    sure = _fullest(plan, facts, {role: sure_bytes(plan, role) for role in roles(plan)})
    if sure > enough:
        return sure
    return _fullest(plan, facts, {row.role: row.total for row in memory_budget(plan).rows})


def _fullest(plan: Plan, facts: Facts, bytes_of: dict[Role, int]) -> int:
    """Return the bytes of the machine that takes most. bytes_of: a rank's, by role."""
    stages = dict[int, int]()
    for role, taken in bytes_of.items():
        # Slices of one stage differ by a part of the vocabulary at most.
        stages[role.pipeline] = max(taken, stages.get(role.pipeline, 0))
    here = facts.node_ranks
    by_rank = [stages[plan.grid.coordinate(rank, Axis.PIPELINE)] for rank in range(facts.world)]
    return max(sum(by_rank[first : first + here]) for first in range(0, facts.world, here))


def _shorter(recipe: Recipe, plan: Plan) -> Iterator[Change]:
    """Yield shorter sequences, halved again and again."""
    length = plan.batch.sequence_length // 2
    while length >= SHORTEST:
        yield Change(
            (f"data.sequence_length={length}",), replace(recipe, data=replace(recipe.data, sequence_length=length))
        )
        length //= 2
