"""Whether a machine has as many GPUs as ranks."""

from typing import TYPE_CHECKING

from llmtrain.comm.environment import Launched
from llmtrain.errors import (
    BadInputError,
)

if TYPE_CHECKING:
    pass


def check_gpus(gpus: int, place: Launched | None, world: int) -> None:
    """Raise BadInputError where this machine is to have more ranks than it has GPUs.

    place: this rank's, None where all `world` ranks are started here. Where a launcher gives each rank a GPU of its
    own, a rank sees but that one.
    """
    # Not every launcher says how many it starts on a machine, but all number them.
    here = world if place is None else place.local_rank + 1
    if gpus and here > gpus and (place is None or gpus > 1):
        raise BadInputError(
            f"there are to be {here} ranks or more on a machine with {gpus} GPUs; start at most one for each GPU, or "
            "hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on its processors"
        )
