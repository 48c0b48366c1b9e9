"""Where `offload.gradients: auto` puts the sums of gradients, and where they cannot go. No torch in here."""

from dataclasses import replace

from llmtrain.errors import BadInputError
from llmtrain.plan.facts import Device
from llmtrain.plan.plan import Compute
from llmtrain.recipe.offload import OffloadConfig
from llmtrain.recipe.schema import Recipe


def offload_of(recipe: Recipe, device: Device, compute: Compute) -> OffloadConfig:
    """Return a recipe's offload, with `gradients` decided. compute: dtype of matrix products. Raises BadInputError."""
    given = recipe.offload
    reason = _summed_by(recipe, device, compute)
    if given.gradients == "auto":
        return replace(given, gradients="none" if reason else given.parameters)
    if given.gradients != "none" and reason:
        raise BadInputError(
            f"offload.gradients is {given.gradients}, but with {reason} tensor-parallel ranks add up gradients after "
            "all microbatches; set it to none, or leave it out"
        )
    return given


def _summed_by(recipe: Recipe, device: Device, compute: Compute) -> str | None:
    """Return the key because of which tensor-parallel ranks add up sums of gradients, as `Plan.averages_replicas` has
    it; None if they do not."""
    if recipe.parallel.tensor == 1:
        return None
    if recipe.parallel.sequence:
        return "parallel.sequence"
    given = recipe.quantize.gradients
    packed = recipe.zero.preset in ("zero++", "topo") if given is None else given != "none"
    if packed:
        return "quantize.gradients"
    if device == "cpu":
        return None
    if compute == "fp32":
        return "precision.compute=fp32"
    if recipe.train.compile is True:
        return "train.compile=true"
    return "precision.reduce=fp32" if recipe.precision.reduce == "fp32" else None
