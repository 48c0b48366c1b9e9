"""Where `offload.gradients: auto` puts the sums of gradients, and where they cannot go. No torch in here."""

from dataclasses import replace

from llmtrain.errors import BadInputError
from llmtrain.recipe.offload import OffloadConfig
from llmtrain.recipe.schema import Recipe


def offload_of(recipe: Recipe) -> OffloadConfig:
    """Return a recipe's offload, with `gradients` decided. Raises BadInputError."""
    given = recipe.offload
    reason = _summed_by(recipe)
    if given.gradients == "auto":
        return replace(given, gradients="none" if reason else given.parameters)
    if given.gradients != "none" and reason:
        raise BadInputError(
            f"offload.gradients is {given.gradients}, but with {reason} tensor-parallel ranks add up gradients after "
            "all microbatches; set it to none, or leave it out"
        )
    return given


def _summed_by(recipe: Recipe) -> str | None:
    """Return the key because of which tensor-parallel ranks add up sums of gradients; None if they do not."""
    if recipe.parallel.tensor == 1:
        return None
    if recipe.parallel.sequence:
        return "parallel.sequence"
    given = recipe.quantize.gradients
    packed = recipe.zero.preset in ("zero++", "topo") if given is None else given != "none"
    return "quantize.gradients" if packed else None
