"""A run that does not fit the memory of its ranks: why, and the change that makes it fit. No torch in here."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from llmtrain_data import units

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.memory import StatedMemory, stated_host_memory, stated_memory
from llmtrain.errors import BadInputError
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.device_overhead import overhead_of
from llmtrain.plan.memory.memory_budget import Budget, memory_budget, surely_exceeds
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.changes import Change, Values, changes, file_changes, host_changes
from llmtrain.plan.resolve.check import check
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.schema import Recipe
from llmtrain.recipe.zero import STAGES

# How many times as many ranks are tried.
TIMES = (2, 4, 8)
# Keys that, alone, change no model states.
OF_ACTIVATIONS = (
    "parallel.sequence",
    "activation_checkpointing",
    "train.microbatch",
    "offload.activations",
    "offload.paths",
)


def refusal(recipe: Recipe, facts: Facts, plan: Plan, budget: Budget | None = None) -> str | None:
    """Return a sentence on why a recipe's plan does not fit the stated memory, and on what to change; None if it fits.

    The sentence names the first change that makes it fit, in the order of `changes`; if none does, more ranks with
    which it fits. budget: the plan's, if it is known.
    """
    stated, host = stated_memory(plan.cluster), stated_host_memory(plan.cluster, plan.grid.world)
    if stated is None and host is None:
        return None
    found = memory_budget(plan) if budget is None else budget
    if stated is not None and found.excess:
        said = _device_excess(found, stated)
    elif host is not None and found.host_excess:
        said = _host_excess(found, host)
    else:
        return None
    process = overhead_of(plan.device).process
    if host is not None and process > host.size:
        fixed = f"each rank's process takes {units.size(process)} of its host's memory, whatever the run is"
        return f"{said}; {fixed}, so take nodes with more of it, or fewer ranks of each (--force takes it as it is)"
    if advised := advice(recipe, facts, plan, found):
        change, after = advised
        needed = _needed(plan, found, after)
        return f"{said}; {change.advice}, which needs {needed} (--force takes it as it is)"
    more = _more_ranks(recipe, facts, plan)
    files = _first_fitting(file_changes(recipe, plan), facts, found)
    instead = f"take {more}, or a smaller model" if more else "take a smaller model"
    if files:
        change, after = files
        instead = f"{change.advice}, which needs {_needed(plan, found, after)}, or {instead}"
    return (
        f"{said}; no change of zero.stage, activation_checkpointing, train.microbatch, parallel, pipeline, offload or "
        f"checkpoint.async that llmtrain tries, alone or in pairs, makes it fit{' without files' if files else ''}, so "
        f"{instead} (--force takes it as it is)"
    )


def _needed(plan: Plan, before: Budget, after: Budget) -> str:
    """Return the bytes of the memory that lacked, and those of a node's host where more is offloaded to it and its
    description states no memory."""
    needed = units.size(after.fullest.total if before.excess else after.host)
    offloaded = [max(row.offloaded for row in budget.rows) for budget in (before, after)]
    if after.host_limit is not None or offloaded[1] <= offloaded[0]:
        return needed
    ranks = min(plan.grid.world, plan.cluster.node.ranks if plan.cluster else plan.grid.world)
    return f"{needed}, and {units.size(after.host * ranks)} of the host's memory of a node"


def _device_excess(budget: Budget, stated: StatedMemory) -> str:
    row = budget.fullest
    return (
        f"rank {row.role.rank} needs {units.size(row.total)}, {units.size(budget.excess)} more than "
        f"cluster.accelerator.memory ({stated.text})"
    )


def _host_excess(budget: Budget, stated: StatedMemory) -> str:
    return (
        f"a rank needs {units.size(budget.host)} of its host's memory (mean of a node's ranks), "
        f"{units.size(budget.host_excess)} more than its share of cluster.node.host.memory ({stated.text})"
    )


def advice(recipe: Recipe, facts: Facts, plan: Plan, budget: Budget) -> tuple[Change, Budget] | None:
    """Return the first change with which a recipe fits, and its memory; None if none does. Where the host's memory
    alone is exceeded, `host_changes` come before `changes`. budget: the plan's."""
    host = host_changes(recipe, plan) if not budget.excess else ()
    return _first_fitting((*host, *changes(recipe, plan)), facts, budget)


def _first_fitting(several: Iterable[Change], facts: Facts, budget: Budget) -> tuple[Change, Budget] | None:
    """Return the first of several changes with which a recipe fits, and its memory; None if none does. budget: of the
    plan without a change."""
    limit = budget.limit
    states_exceed = limit is not None and any(row.model_states > limit for row in budget.rows)
    for change in several:
        if states_exceed and all(key.partition("=")[0] in OF_ACTIVATIONS for key in change.keys):
            continue
        if after := _fitting(change.recipe, facts):
            return change, after
    return None


def planned(recipe: Recipe, facts: Facts) -> Plan | None:
    """Return the checked plan of a changed recipe; None if the change is impossible with the other keys."""
    try:
        plan = make_plan(recipe, facts)
        check(plan, facts)
    except BadInputError:
        return None
    return plan


def _fitting(recipe: Recipe, facts: Facts) -> Budget | None:
    """Return the memory of a recipe that fits what is stated; None if it does not fit, or is impossible."""
    least = _least(recipe)
    plan = planned(least, facts)
    if plan is None or surely_exceeds(plan) or (least != recipe and (plan := planned(recipe, facts)) is None):
        return None
    after = memory_budget(plan)
    return None if after.exceeds else after


def _least(recipe: Recipe) -> Recipe:
    """Return a recipe that is planned sooner, and that takes no more of the device."""
    train, offload = recipe.train, recipe.offload
    # What the host steps ahead takes nothing of the device.
    ahead = offload.optimizer != "none" and offload.spare == "auto"
    return replace(
        recipe,
        train=replace(train, microbatch=1) if train.microbatch == "auto" else train,
        offload=replace(offload, spare=0.0, spare_weights="host") if ahead else offload,
    )


def _more_ranks(recipe: Recipe, facts: Facts, plan: Plan) -> str | None:
    """Return the least of some larger numbers of ranks with which a recipe fits, and what else it then sets; None if it
    fits with none of them."""
    for times in TIMES:
        # Each machine has as many ranks as now.
        more = replace(facts, world=times * facts.world, ranks_per_node=facts.node_ranks)
        for values in _with_more_ranks(recipe, plan, times, more.node_ranks):
            change = Change.of(recipe, values)
            if _fitting(change.recipe, more):
                return " ".join([f"{more.world} ranks", *(("with", *change.keys) if change.keys else ())])
    return None


def _with_more_ranks(recipe: Recipe, plan: Plan, times: int, node: int) -> Iterator[Values]:
    """Yield what a recipe sets on `times` as many ranks: more replicas, which share the model states, or as many
    replicas of more ranks each. node: ranks of a machine, over which tensor parallelism goes at most."""
    open_data = {} if recipe.parallel.data == "auto" else {"parallel.data": "auto"}
    yield open_data
    if recipe.zero.stage != STAGES[-1]:
        yield open_data | {"zero.stage": STAGES[-1]}
    yield open_data | {"zero.stage": STAGES[-1], "activation_checkpointing": "auto", "train.microbatch": "auto"}
    if (tensor := times * plan.grid.degree(Axis.TENSOR)) <= node:
        yield {"parallel.tensor": tensor}
