"""How a resolved recipe's forward and backward passes go. No torch in here."""

from dataclasses import replace

from llmtrain.plan.degrees import degrees_of
from llmtrain.plan.pipeline.actions import Schedule
from llmtrain.plan.pipeline.schedules import make_schedule
from llmtrain.plan.resolve import replica_share
from llmtrain.recipe.schema import EveryK, Recipe


def schedule_of(recipe: Recipe) -> Schedule:
    """Return the schedule of a resolved recipe; one without actions where what has arrived says what is next."""
    ranks, name, chunks = recipe.parallel.pipeline, recipe.pipeline.schedule, int(recipe.pipeline.chunks)
    microbatches = replica_share(recipe, int(recipe.parallel.data)) // int(recipe.train.microbatch)
    if ranks == 1:
        return make_schedule("1f1b", 1, 1, microbatches)
    if name == "message-driven":
        return Schedule(ranks, 1, microbatches, (), hands_back=hands_back(recipe))
    return replace(make_schedule(name, ranks, chunks, microbatches), hands_back=hands_back(recipe))


def hands_back(recipe: Recipe) -> bool:
    """Return whether backward passes may hand back the gradients of inputs before they compute those of weights.

    What is recomputed, or gathered, would have to stay until then, and torch.compile does not see through it. Where
    ranks share the sequence, what waits is gathered once more, in most passes of GPipe.
    """
    if recipe.train.compile or recompute_of(recipe) or degrees_of(recipe).weights > 1:
        return False
    return not (recipe.parallel.sequence and recipe.pipeline.schedule == "gpipe")


def recompute_of(recipe: Recipe) -> int:
    """Return how many blocks a resolved recipe recomputes together in the backward pass, 0 for none."""
    match recipe.activation_checkpointing:
        case EveryK(every=every):
            return every
        case "full":
            return 1
        case _:
            return 0
