"""Load a checkpoint: every rank reads its own ranges, whichever layout saved them."""

import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from llmtrain_data.untrusted import reason
from pydantic import JsonValue

from llmtrain.checkpoint.deleted import failure_of
from llmtrain.checkpoint.folder import find_checkpoints, step_of
from llmtrain.checkpoint.manifest import check_model
from llmtrain.checkpoint.plain_file import DamagedError, UnreachableError, patiently
from llmtrain.checkpoint.read import CheckpointReader
from llmtrain.checkpoint.state_shard import StateRange
from llmtrain.checkpoint.store_messages import StoreMessages
from llmtrain.comm.ranks import Ranks
from llmtrain.errors import BadInputError, RunFailedError
from llmtrain.model.config import GPTConfig


def load_latest(
    path: Path,
    shards: Sequence[StateRange],
    ranks: Ranks,
    warn: Callable[[str], None],
    model: GPTConfig | None = None,
    preferred: int | None = None,
) -> dict[str, JsonValue] | None:
    """Fill `shards` from the newest sound checkpoint; return its progress, or None if there is no checkpoint.

    path: the folder of a run, its checkpoints, or one checkpoint. warn: called on every rank with a sentence for each
    damaged checkpoint, which is skipped, and with those of `check_model`. model: the recipe's, which it compares with
    the checkpoint's. preferred: the step whose checkpoint comes before newer ones. Collective. Raises
    RunFailedError if there are checkpoints but none is sound, UnreachableError on all ranks if one of them cannot read
    a checkpoint that may be sound, BadInputError if a sound one holds another model than `shards`.
    """
    messages = StoreMessages(ranks, "load")
    folders = sorted(_candidates(path, ranks, messages), key=lambda folder: step_of(folder) != preferred)
    for folder in folders:
        ranks.activity.begin(f"loading the checkpoint {folder.name}")
        try:
            return _load(folder, shards, ranks, messages, model, warn)
        except DamagedError as error:
            warn(f"skipped the checkpoint {folder}: {error}")
    if folders:
        raise RunFailedError(f"no checkpoint in {path} is sound; remove them to start anew")
    return None


def load(folder: Path, shards: Sequence[StateRange], ranks: Ranks) -> dict[str, JsonValue]:
    """Fill the states of `shards` in place from the checkpoint in `folder`; return its progress. Collective.

    A checkpoint of step 0 may lack optimizer states, which are then zeroed. After an error the states are undefined.
    Raises RunFailedError if the checkpoint is damaged, UnreachableError if it cannot be read, BadInputError if it holds
    another model than `shards`.
    """
    try:
        return _load(folder, shards, ranks, StoreMessages(ranks, "load"))
    except DamagedError as error:
        raise failure_of(folder, error) from error


def _candidates(path: Path, ranks: Ranks, messages: StoreMessages) -> list[Path]:
    """Return the checkpoints that rank 0 sees: on a shared file system, other ranks may see them later. Raises
    UnreachableError on all ranks if it cannot list them."""
    if ranks.is_main:
        found, failure = list[Path](), ""
        try:
            found = patiently(path, lambda: find_checkpoints(path) if path.is_dir() else [])
        except OSError as error:
            failure = _sentence(ranks, "list the checkpoints", error)
        messages.publish("folders", json.dumps([failure, *map(str, found)]))
    failure, *folders = json.loads(messages.wait_for("folders"))
    if failure:
        raise UnreachableError(failure)
    return [Path(folder) for folder in folders]


def _sentence(ranks: Ranks, what: str, error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return (
        f"rank {ranks.rank} on {socket.gethostname()} cannot {what}: {where}{reason(error)}; the same command resumes "
        "once it can"
    )


def _load(
    folder: Path, shards: Sequence[StateRange], ranks: Ranks, messages: StoreMessages, model: GPTConfig | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> dict[str, JsonValue]:  # fmt: skip
    """Load on every rank; if any rank has an error, raise the same error on all."""
    messages.begin()
    progress: dict[str, JsonValue] = {}
    failure: UnreachableError | DamagedError | BadInputError | None = None
    try:
        progress = _fill(folder, shards, model, warn, ranks.activity.moving)
    except (DamagedError, BadInputError) as error:
        failure = error
    except OSError as error:
        failure = UnreachableError(_sentence(ranks, f"load the checkpoint {folder.name}", error))
    if failure is not None:
        messages.publish(type(failure).__name__, str(failure))
    # A checkpoint that one rank cannot read may be sound, whatever others say.
    kinds = (UnreachableError, DamagedError, BadInputError)
    counts = ranks.sum_all([float(isinstance(failure, kind)) for kind in kinds])
    for kind, count in zip(kinds, counts, strict=True):
        if count:
            raise kind(messages.wait_for(kind.__name__))
    return progress


def _fill(
    folder: Path, shards: Sequence[StateRange], model: GPTConfig | None, warn: Callable[[str], None],
    moving: Callable[[float], None],
) -> dict[str, JsonValue]:  # fmt: skip
    with CheckpointReader(folder) as reader:
        if model is not None:
            weights_alone = all(shard.names == ("master",) for shard in shards)
            for sentence in check_model(folder, reader.manifest, model, weights_alone):
                warn(sentence)
        for shard in shards:
            _check_fits(reader, shard)
        done, total = 0, sum(len(shard.names) * (shard.end - shard.start) for shard in shards)
        for shard in shards:
            for state in shard.names:
                if state not in reader.manifest.states:
                    shard.write(state, 0, torch.zeros(()).expand(shard.end - shard.start))
                    continue
                offset = 0
                for tensor, first, last in shard.unit.tensor_ranges(shard.start, shard.end):
                    for position, read in reader.read(tensor.name, state, first, last):
                        done += len(read)
                        moving(done / total)
                        shard.write(state, offset + position - first, read)
                    offset += last - first
        return reader.manifest.progress


def _check_fits(reader: CheckpointReader, shard: StateRange) -> None:
    """Raise BadInputError unless the checkpoint has the tensors and states of `shard`."""
    manifest = reader.manifest
    for tensor in shard.unit.tensors:
        entry = manifest.tensors.get(tensor.name)
        if entry is None or entry.shape != list(tensor.shape):
            stored = "not at all" if entry is None else f"with shape {entry.shape}"
            raise BadInputError(
                f"the checkpoint {reader.folder} has {tensor.name} {stored}, but the recipe's model has it "
                f"with shape {list(tensor.shape)}; make the recipe's model the same"
            )
    missing = sorted(set(shard.names) - manifest.states)
    if missing and manifest.step:
        raise BadInputError(
            f"the checkpoint {reader.folder} of step {manifest.step} lacks the optimizer states {missing}; "
            "only a checkpoint of step 0 may; start from another one"
        )
