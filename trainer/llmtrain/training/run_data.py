"""A run's data: opened, and compared with the data of its checkpoints and of the other nodes."""

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict

from llmtrain_data.dataset import Samples, open_split
from llmtrain_data.errors import DataError
from llmtrain_data.fingerprint import Fingerprint, difference, fingerprint
from pydantic import JsonValue, TypeAdapter, ValidationError

from llmtrain.comm.ranks import Ranks
from llmtrain.errors import BadInputError
from llmtrain.plan.plan import Plan

# The key of the data's fingerprints in a checkpoint's progress.
DATA = "data"

_FINGERPRINTS = TypeAdapter(list[Fingerprint])


def open_data(plan: Plan, moving: Callable[[], None] = lambda: None) -> tuple[Samples, Samples | None]:
    """Return the training and the validation split; None for the latter without evaluation. moving: called while they
    are read. Raises DataError."""
    training = open_split(plan.data, "train", plan.model.vocab)
    training.check_ids(moving)
    evaluated = plan.training.eval_every and plan.data.validates
    return training, open_split(plan.data, "valid", plan.model.vocab) if evaluated else None


def document_begin(progress: Mapping[str, JsonValue]) -> int | None:
    """Return the id that begins each document of a checkpoint's data; None if there is none, or not in all sets alike.

    progress: of the checkpoint. Raises ValidationError if its fingerprints cannot be read.
    """
    begins = {one.begin for one in _FINGERPRINTS.validate_python(progress.get(DATA, []))}
    return begins.pop() if len(begins) == 1 else None


def check_data(
    data: Samples, saved: dict[str, JsonValue] | None, accepted: bool, ranks: Ranks, warn: Callable[[str], None]
) -> list[Fingerprint]:
    """Return the fingerprints of the data, and check that the run may train on it. Collective.

    saved: progress of one of the run's own checkpoints, or None. accepted: whether the data may differ from that of the
    checkpoint. Raises BadInputError if it may not, or if this node's data differs from that of the main rank's node.
    """
    found: list[Fingerprint] = []
    refusal = ""
    if ranks.local_rank == 0 or ranks.is_main:
        try:
            found = [fingerprint(source.data) for source in data.sources]
            refusal = _other_data(found, saved, accepted, warn) if ranks.is_main else ""
        except DataError as error:
            refusal = str(error)
    text = json.dumps({"refusal": refusal, "found": [asdict(one) for one in found]})
    heard = json.loads(ranks.from_main("data", text))
    if heard["refusal"] or refusal:
        raise BadInputError(heard["refusal"] or refusal)
    for mine, first in zip(found, _FINGERPRINTS.validate_python(heard["found"]), strict=False):
        if not mine.same_data(first):
            where = f"{socket.gethostname()} holds other data than on {ranks.host_of(0)}"
            raise BadInputError(f"{mine.path} on {where}; copy the same files to both")
    return found


def _other_data(
    now: list[Fingerprint], saved: dict[str, JsonValue] | None, accepted: bool, warn: Callable[[str], None]
) -> str:
    """Return why the run must not resume with this data; empty if it may."""
    if saved is None or DATA not in saved:
        # There is nothing to resume from, or the checkpoint predates fingerprints.
        return ""
    try:
        before = _FINGERPRINTS.validate_python(saved[DATA])
    except ValidationError as error:
        return (
            f"the checkpoint's fingerprints of the data cannot be read: {error.errors()[0]['msg']}; remove that "
            "checkpoint to resume from the one before"
        )
    found = difference(before, now)
    if found and accepted:
        warn(f"{found}; data.accept_changed accepts that")
        return ""
    return found and f"{found}; bring that data back, or set data.accept_changed=true to resume with this"
