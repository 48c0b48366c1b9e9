"""What `train.microbatch: auto` and `activation_checkpointing: auto` stand for. No torch in here.

Where a memory is stated, a microbatch is the largest that fits, and blocks are recomputed only if not even the smallest
fits without.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isqrt

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.memory import stated_memory
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import memory_budget, surely_exceeds
from llmtrain.plan.plan import Plan
from llmtrain.recipe.schema import Recipe

PlanOf = Callable[[Recipe], Plan]
# Sequences of the largest microbatch on a CPU, which a larger one makes no faster, or in a memory that is not stated.
MOST = 8


def microbatches(share: int, stages: int, most: int) -> list[int]:
    """Return the divisors of `share` up to `most`, ascending, that leave each stage of a pipeline four microbatches, so
    that ranks idle at most a fifth of the time; 1 where no divisor does."""
    least = 4 * stages if stages > 1 else 1
    small = [size for size in range(1, isqrt(share) + 1) if share % size == 0]
    divisors = sorted({*small, *(share // size for size in small)})
    return [size for size in divisors if size <= most and share // size >= least] or [1]


def with_batch_that_fits(recipe: Recipe, facts: Facts, plan_of: PlanOf, shared: PlanOf) -> Recipe:
    """Return a recipe with a microbatch and with recomputation that fit the stated memory; those that take least if
    none do, and the same recipe if it leaves neither open or no memory is stated.

    plan_of: makes the plan of a recipe whose `offload.share` is a number. shared: of any. What else fills memory, such
    as gathered weights, has what is left.
    """
    # Activations that leave are the inputs of recomputed groups.
    recomputes = recipe.activation_checkpointing == "auto" and recipe.offload.activations == "none"
    given = recipe.train.microbatch
    if stated_memory(facts.cluster) is None or not (recomputes or given == "auto"):
        return recipe
    sizes = _sizes(recipe, facts) if given == "auto" else [given]
    ways = ("none", "auto", "full") if recomputes else (recipe.activation_checkpointing,)

    fitting = list[int]()
    for way in ways:
        tried = replace(recipe, activation_checkpointing=way)  # type: ignore[arg-type]
        fitting.append(_fitting(tried, sizes, plan_of, shared))
        if way == "none" and fitting[0]:
            break
    # Blocks are recomputed at the same cost in groups of any size.
    most = max(fitting)
    chosen = replace(recipe, activation_checkpointing=ways[fitting.index(most) if most else -1])  # type: ignore[arg-type]
    return _with_size(chosen, sizes[max(0, most - 1)])


def _with_size(recipe: Recipe, microbatch: int) -> Recipe:
    return replace(recipe, train=replace(recipe.train, microbatch=microbatch))


def _fitting(recipe: Recipe, sizes: Sequence[int], plan_of: PlanOf, shared: PlanOf) -> int:
    """Return how many of the ascending microbatches fit the stated memory."""
    least, leaves = with_least(recipe), recipe.offload.optimizer != "none" and recipe.offload.share == "auto"

    def exceeds(size: int) -> bool:
        budget = memory_budget(plan_of(_with_size(least, size)))
        if budget.excess or not (leaves and budget.host_excess):
            return budget.exceeds
        # The host has no room for all optimizer states, but may have it for those that must leave.
        open_share = replace(least, offload=replace(least.offload, share="auto"))
        return memory_budget(shared(_with_size(open_share, size))).exceeds

    # The memory of programs, which takes long to plan, depends little on the microbatch.
    count = bisect_left(sizes, True, key=lambda size: surely_exceeds(plan_of(_with_size(least, size))))
    while count and exceeds(sizes[count - 1]):
        count -= 1
    return count


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
