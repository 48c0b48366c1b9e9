"""What `train.microbatch: auto` and `activation_checkpointing: auto` stand for. No torch in here.

Where a memory is stated, a microbatch is the largest that fits, and blocks are recomputed only if not even the smallest
fits without, or if a larger one saves more time of moving offloaded weights and gradients than that takes.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import isqrt

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.memory import stated_memory
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import memory_budget, surely_exceeds
from llmtrain.plan.plan import Plan
from llmtrain.recipe.schema import Recipe

PlanOf = Callable[[Recipe, Facts], Plan]
# Sequences of the largest microbatch on a CPU, which a larger one makes no faster, or in a memory that is not stated.
MOST = 8


def microbatches(share: int, stages: int, most: int) -> list[int]:
    """Return the divisors of `share` up to `most`, ascending, that leave each stage of a pipeline four microbatches, so
    that ranks idle at most a fifth of the time; 1 where no divisor does."""
    least = 4 * stages if stages > 1 else 1
    small = [size for size in range(1, isqrt(share) + 1) if share % size == 0]
    divisors = sorted({*small, *(share // size for size in small)})
    return [size for size in divisors if size <= most and share // size >= least] or [1]


def batches_that_fit(recipe: Recipe, facts: Facts, plan_of: PlanOf, shared: PlanOf) -> Iterator[Recipe]:
    """Yield the recipe with a microbatch and with recomputation that fit the stated memory; with those that take least
    if none do, and as it is if it leaves neither open or no memory is stated. A second one has a larger microbatch,
    with recomputation, where offloaded weights or gradients move for each microbatch.

    plan_of: makes the plan of a recipe whose `offload.share` is a number. shared: of any. What else fills memory, such
    as gathered weights, has what is left.
    """
    # Activations that leave are the inputs of recomputed groups.
    recomputes = recipe.activation_checkpointing == "auto" and recipe.offload.activations == "none"
    given = recipe.train.microbatch
    if stated_memory(facts.cluster) is None or not (recomputes or given == "auto"):
        yield recipe
        return
    sizes = _sizes(recipe, facts) if given == "auto" else [given]
    first = replace(recipe, activation_checkpointing="none") if recomputes else recipe
    count = _fitting(first, sizes, facts, plan_of, shared)
    if count or not recomputes:
        yield _with_size(first, sizes[max(0, count - 1)])
    if not recomputes or (count and not weighs_moves(recipe, facts)):
        return
    chosen = None if count else _with_size(replace(recipe, activation_checkpointing="full"), sizes[0])
    # The last product of a group is not recomputed, so that the smallest groups are recomputed in the least time.
    for way in ("full", "auto"):
        tried = replace(recipe, activation_checkpointing=way)
        if more := _fitting(tried, sizes[count:], facts, plan_of, shared):
            count += more
            chosen = _with_size(tried, sizes[count - 1])
    if chosen is not None:
        yield chosen


def weighs_moves(recipe: Recipe, facts: Facts) -> bool:
    """Return whether a recipe leaves open how often offloaded weights or gradients move: for each microbatch, of which
    recomputation lets larger ones fit."""
    # A CPU's memory is the host's.
    elsewhere = ("nvme",) if facts.device == "cpu" else ("host", "nvme")
    offload = recipe.offload
    moved = offload.parameters in elsewhere or offload.gradients in elsewhere
    is_open = recipe.activation_checkpointing == recipe.train.microbatch == "auto"
    return moved and is_open and recipe.pipeline.schedule != "breadth-first"


def _with_size(recipe: Recipe, microbatch: int) -> Recipe:
    return replace(recipe, train=replace(recipe.train, microbatch=microbatch))


def _fitting(recipe: Recipe, sizes: Sequence[int], facts: Facts, plan_of: PlanOf, shared: PlanOf) -> int:
    """Return how many of the ascending microbatches fit the stated memory."""
    least, leaves = with_least(recipe), recipe.offload.optimizer != "none" and recipe.offload.share == "auto"
    # What else the host has to hold does not depend on the microbatch.
    counted = facts if leaves or recipe.offload.activations != "none" else _without_host(facts)

    def exceeds(size: int) -> bool:
        budget = memory_budget(plan_of(_with_size(least, size), counted))
        if budget.excess or not (leaves and budget.host_excess):
            return budget.exceeds
        # The host has no room for all optimizer states, but may have it for those that must leave.
        open_share = replace(least, offload=replace(least.offload, share="auto"))
        return memory_budget(shared(_with_size(open_share, size), counted)).exceeds

    # The memory of programs, which takes long to plan, depends little on the microbatch.
    count = bisect_left(sizes, True, key=lambda size: surely_exceeds(plan_of(_with_size(least, size), counted)))
    while count and exceeds(sizes[count - 1]):
        count -= 1
    return count


def _without_host(facts: Facts) -> Facts:
    """Return facts whose cluster states no memory of a host."""
    cluster = facts.cluster
    if cluster is None or cluster.node.host is None or facts.device == "cpu":
        return facts
    host = replace(cluster.node.host, memory=None)
    return replace(facts, cluster=replace(cluster, node=replace(cluster.node, host=host)))


def _sizes(recipe: Recipe, facts: Facts) -> list[int]:
    grid = facts.topology(recipe.parallel).grid
    share = recipe.train.global_batch // grid.degree(Axis.DATA)
    return microbatches(share, grid.degree(Axis.PIPELINE), MOST if facts.device == "cpu" else share)


def with_least(recipe: Recipe) -> Recipe:
    """Return the recipe with the least memory for gathered weights and resident optimizer states, where they are
    auto."""
    zero = recipe.zero if recipe.zero.resident != "auto" else replace(recipe.zero, resident=0)
    given = recipe.offload
    leaves = given.optimizer != "none" and given.share == "auto"
    return replace(recipe, zero=zero, offload=replace(given, share=1.0) if leaves else given)
