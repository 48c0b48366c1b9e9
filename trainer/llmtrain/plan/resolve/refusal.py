"""A run that does not fit the memory of its ranks: why, and the change that makes it fit. No torch in here."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from llmtrain_data import units

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.memory import StatedMemory, stated_host_memory, stated_memory
from llmtrain.errors import BadInputError
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import Budget, memory_budget, surely_exceeds
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.check import check
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.schema import Recipe
from llmtrain.recipe.zero import STAGES


@dataclass(frozen=True)
class Change:
    """A change of a recipe. keys: what it sets, as `key=value`. recipe: the changed recipe."""

    keys: tuple[str, ...]
    recipe: Recipe


def refusal(recipe: Recipe, facts: Facts, plan: Plan, budget: Budget | None = None) -> str | None:
    """Return a sentence on why a recipe's plan does not fit the stated memory, and on what to change; None if it fits.

    The sentence names the first single change that makes it fit, in the order of `changes`. budget: the plan's, if it
    is known.
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
    advised = advice(recipe, facts, plan, found)
    if advised is None:
        return (
            f"{said}; no single change of zero.stage, activation_checkpointing, train.microbatch, parallel, "
            "offload or checkpoint.async makes it fit, so take more ranks or a smaller model (--force takes it as it "
            "is)"
        )
    change, after = advised
    needed = units.size(after.fullest.total if found.excess else after.host)
    return f"{said}; set {' '.join(change.keys)}, which needs {needed} (--force takes it as it is)"


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
    for change in (*(host_changes(recipe, plan) if not budget.excess else ()), *changes(recipe, plan)):
        try:
            changed = make_plan(change.recipe, facts)
            check(changed, facts)
        except BadInputError:
            # The change is impossible with the other keys.
            continue
        if surely_exceeds(changed):
            continue
        after = memory_budget(changed)
        if not after.exceeds:
            return change, after
    return None


def changes(recipe: Recipe, plan: Plan) -> Iterator[Change]:
    """Yield the single changes that may take less memory, those that cost least time first: a larger zero.stage,
    activation checkpointing, a smaller microbatch, larger parallel.tensor and parallel.pipeline, and offload of
    activations, where they are recomputed, of optimizer states, and of all model states."""
    for stage in STAGES[(recipe.zero.stage or 0) + 1 :]:
        yield Change((f"zero.stage={stage}",), replace(recipe, zero=replace(recipe.zero, stage=stage)))
    if recipe.activation_checkpointing == "none":
        yield _checkpointing(recipe, "auto")
    if recipe.activation_checkpointing != "full":
        yield _checkpointing(recipe, "full")
    share = plan.batch.microbatch * plan.batch.microbatches
    for size in range(plan.batch.microbatch - 1, 0, -1):
        if share % size == 0:
            train = replace(recipe.train, microbatch=size)
            yield Change((f"train.microbatch={size}",), replace(recipe, train=train))
    yield from _grids(recipe, plan)
    tiers = ("host", "nvme") if _has_volumes(recipe, plan) else ("host",)
    for key in (*(("activations",) if plan.recomputes else ()), "optimizer"):
        if getattr(recipe.offload, key) == "none":
            for tier in tiers:
                offload = replace(recipe.offload, **{key: tier})  # type: ignore[arg-type]
                yield Change((f"offload.{key}={tier}",), replace(recipe, offload=offload))
    if recipe.offload.parameters == "none":
        states = ("optimizer", "parameters") if recipe.offload.optimizer == "none" else ("parameters",)
        for tier in tiers:
            offload = replace(recipe.offload, **dict.fromkeys(states, tier))  # type: ignore[arg-type]
            yield Change(tuple(f"offload.{key}={tier}" for key in states), replace(recipe, offload=offload))


def host_changes(recipe: Recipe, plan: Plan) -> Iterator[Change]:
    """Yield the single changes that may take less of the host's memory: no copies for checkpoints, no spare memory,
    files instead of the host, a smaller share of what leaves the device, and none."""
    given = recipe.offload
    # Offloaded states are written to the checkpoint directly, without a copy.
    if plan.checkpoint.asynchronous and not plan.sharding.offload.share:
        yield Change(
            ("checkpoint.async=false",), replace(recipe, checkpoint=replace(recipe.checkpoint, asynchronous=False))
        )
    if plan.sharding.offload.spare:
        yield Change(("offload.spare=0",), replace(recipe, offload=replace(given, spare=0.0)))
    for key in ("activations", "optimizer", "parameters"):
        if getattr(given, key) == "host" and _has_volumes(recipe, plan):
            changed = replace(given, **{key: "nvme"})  # type: ignore[arg-type]
            yield Change((f"offload.{key}=nvme",), replace(recipe, offload=changed))
    if given.activations == "host":
        yield Change(("offload.activations=none",), replace(recipe, offload=replace(given, activations="none")))
    if given.optimizer == "none":
        return
    for tenths in range(9, 0, -1):
        if tenths / 10 < plan.sharding.offload.share:
            share = replace(given, share=tenths / 10)
            yield Change((f"offload.share={tenths / 10}",), replace(recipe, offload=share))
    if not given.paths:
        yield Change(("offload.optimizer=none",), replace(recipe, offload=replace(given, optimizer="none")))


def _has_volumes(recipe: Recipe, plan: Plan) -> bool:
    return bool(recipe.offload.paths or (plan.cluster and plan.cluster.node.nvme))


def _checkpointing(recipe: Recipe, value: str) -> Change:
    changed = replace(recipe, activation_checkpointing=value)  # type: ignore[arg-type]
    return Change((f"activation_checkpointing={value}",), changed)


def _grids(recipe: Recipe, plan: Plan) -> Iterator[Change]:
    """Yield larger degrees of tensor parallelism, inside a node, then of pipeline parallelism; fewer replicas."""
    grid = plan.grid
    node = min(grid.world, plan.cluster.node.ranks if plan.cluster else grid.world)
    for axis, most in ((Axis.TENSOR, node), (Axis.PIPELINE, plan.model.layers)):
        now, replicas = grid.degree(axis), grid.degree(Axis.DATA)
        for degree in range(2 * now, most + 1, now):
            if replicas % (degree // now):
                continue
            keys = {axis.value: degree}
            if recipe.parallel.data != "auto":
                keys["data"] = replicas * now // degree
            parallel = replace(recipe.parallel, **keys)  # type: ignore[arg-type]
            yield Change(
                tuple(f"parallel.{key}={value}" for key, value in keys.items()), replace(recipe, parallel=parallel)
            )
