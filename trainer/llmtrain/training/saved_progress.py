"""How far a run is, as its checkpoints hold it: steps, the position in the data, and the loss scale.

`training.states` restores it, `training.passes` reads the batch at that position, and `training.loop` advances it.
"""

from dataclasses import dataclass, field

from pydantic import JsonValue, TypeAdapter, ValidationError

from llmtrain.errors import RunFailedError
from llmtrain.plan.plan import Batch


@dataclass(kw_only=True)
class Progress:
    """How far a run is; every checkpoint holds it.

    step: optimizer steps done, skipped ones included. samples: sequences of the data that were used or passed over.
    tokens: tokens of the steps. applied: steps that changed the weights. skipped: steps that did not. skipped_in_row:
    skipped steps since the last applied one. loss_scale: None where the loss is not scaled. good_steps: steps since the
    loss scale changed. passed: global batches that were passed over. rewinds: times in a row that the run went back to
    its newest checkpoint. scheduled: step of the newest checkpoint that was due, and not left by a stop. losses: the
    last losses, which a spike is compared with.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    applied: int = 0
    skipped: int = 0
    skipped_in_row: int = 0
    loss_scale: float | None = None
    good_steps: int = 0
    passed: int = 0
    rewinds: int = 0
    scheduled: int = 0
    losses: list[float] = field(default_factory=list)


def progress_of(saved: dict[str, JsonValue], batch: Batch) -> Progress:
    """Return the progress that a checkpoint holds. Raises RunFailedError if it cannot be read."""
    try:
        found = TypeAdapter(Progress).validate_python(saved)
    except ValidationError as error:
        raise RunFailedError(
            f"the checkpoint's progress cannot be read: {error.errors()[0]['msg']}; remove that checkpoint to resume "
            "from the one before"
        ) from error
    if "samples" not in saved:
        # The checkpoint predates these counters.
        found.samples = (found.step + found.passed) * batch.sequences
        found.tokens = found.step * batch.tokens
    if "scheduled" not in saved:
        found.scheduled = found.step
    return found
