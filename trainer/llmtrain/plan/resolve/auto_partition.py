"""What `auto` of `zero.partition` stands for where a run with the smallest degree that its model states fit does not
fit. No torch in here."""

from collections.abc import Iterator
from dataclasses import fields, replace

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.tiers import axis_tiers
from llmtrain.plan.degrees import with_preset
from llmtrain.plan.plan import Plan
from llmtrain.recipe.schema import Recipe


def with_larger_parts(recipe: Recipe, plan: Plan) -> Iterator[Recipe]:
    """Yield the recipe with each larger number of ranks in place of `auto`, ascending. plan: of the recipe."""
    ranks, tiers = plan.grid.degree(Axis.DATA), axis_tiers(plan.tiers, plan.grid, Axis.DATA)
    given = with_preset(recipe.zero, recipe.quantize, tiers)[0].partition
    states = [entry.name for entry in fields(given) if getattr(given, entry.name) == "auto"]
    if not states:
        return
    taken = getattr(next(iter(plan.sharding.placements.values())).degrees, states[0])
    for number in range(taken + 1, ranks + 1):
        if ranks % number == 0:
            partition = replace(given, **dict.fromkeys(states, number))
            yield replace(recipe, zero=replace(recipe.zero, partition=partition))
