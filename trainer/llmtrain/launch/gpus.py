"""Check that a machine has a GPU for each of its ranks."""

from llmtrain.comm.environment import Launched
from llmtrain.errors import BadInputError


def check_gpus(gpus: int, place: Launched | None, world: int) -> None:
    """Raise BadInputError if this machine would run more ranks than it has GPUs.

    place: this rank's launch environment, None if all `world` ranks start here. If a launcher gives each rank its own
    GPU, the rank sees only that one.
    """
    # Not every launcher gives the number of local ranks, but all give the local rank.
    here = world if place is None else place.local_rank + 1
    if gpus and here > gpus and (place is None or gpus > 1):
        raise BadInputError(
            f"there are to be {here} ranks or more on a machine with {gpus} GPUs; start at most one for each GPU, or "
            "hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on its processors"
        )
