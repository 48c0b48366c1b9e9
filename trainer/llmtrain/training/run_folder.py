"""A run's folder: its lock, and the record of its recipe."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmtrain_data.output import say
from llmtrain_data.replace import replace_file
from llmtrain_data.sync import sync_folder
from omegaconf import OmegaConf

from llmtrain.checkpoint.convert.generation import copy_generation
from llmtrain.checkpoint.convert.tokenizer import copy_tokenizer
from llmtrain.comm.ranks import Ranks
from llmtrain.errors import BadInputError, PreemptedError, RunFailedError
from llmtrain.launch.run_lock import LOOK, RunLock
from llmtrain.launch.stop import STOPPED_EARLY, StopRequest
from llmtrain.plan.plan import Plan
from llmtrain.plan.record import record_changes
from llmtrain.training.shared_folder import check_shared
from llmtrain.yaml.dump import to_yaml
from llmtrain.yaml.file import read_yaml
from llmtrain.yaml.shipped import RECORD


def lock_folder(folder: Path, ranks: Ranks, stop: StopRequest) -> RunLock:
    """Make the folder and take its lock. Collective.

    Raises RunFailedError where another run has the lock or a rank does not see the folder, PreemptedError when asked to
    stop while waiting for it.
    """
    lock, refusal, reasons_said = RunLock(folder), None, set[str]()

    def pause(why: str) -> None:
        if stop.asked:
            raise PreemptedError(STOPPED_EARLY)
        if why not in reasons_said:
            reasons_said.add(why)
            say(f"llmtrain: {why}", err=True)
        ranks.activity.record("waiting for the run's folder")
        time.sleep(LOOK)

    if ranks.is_main:
        try:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                refusal = lock.take(pause)
                if refusal is None:
                    # Not at the first save: other nodes may see a new folder only a minute later.
                    (folder / "checkpoints").mkdir(exist_ok=True)
                    sync_folder(folder)
        except (RunFailedError, PreemptedError) as error:
            refusal = str(error)
    try:
        if refusal := ranks.from_main("refusal", refusal or ""):
            raise (PreemptedError if refusal == STOPPED_EARLY else RunFailedError)(refusal)
        check_shared(folder, lock, ranks, stop)
    except BaseException:
        lock.release()
        raise
    return lock


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an OSError inside into a RunFailedError that names the folder."""
    try:
        yield
    except OSError as error:
        raise RunFailedError(f"{folder} cannot be written: {error.strerror}; check logging.dir") from error


def write_record(folder: Path, plan: Plan) -> None:
    """Write the resolved recipe, and copy the tokenizer beside it: the folder can then be moved, sampled and converted.
    Without `data.tokenizer`, it is the one in `model.hf`. Files of an earlier start are replaced whole."""
    with writing(folder):
        replace_file(folder / RECORD, to_yaml(plan.record).encode())
        if (tokenizer := plan.data.tokenizer or plan.import_from) is not None:
            copy_tokenizer(Path(tokenizer), folder / "tokenizer")
        if plan.import_from is not None and plan.data.tokenizer in (None, plan.import_from):
            # With another tokenizer the ids may be others.
            copy_generation(Path(plan.import_from), folder / "tokenizer")


def read_record(folder: Path) -> dict[str, Any]:
    """Return the resolved recipe in the folder; nothing if it cannot be read."""
    try:
        found = OmegaConf.to_container(read_yaml(folder / RECORD, "is not a recipe"))
    except BadInputError:
        return {}
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def measured_on_gpu(folder: Path) -> dict[str, Any]:
    """Return the section `train` of the resolved recipe in the folder, with what a run's first start has measured;
    nothing where there is none, or where a CPU wrote it, which measures nothing."""
    record = read_record(folder)
    train, optimizer = record.get("train"), record.get("optimizer")
    by_cpu = isinstance(optimizer, dict) and optimizer.get("backend") == "cpu"
    return train if isinstance(train, dict) and not by_cpu else {}


def recipe_changes(folder: Path, plan: Plan) -> list[str]:
    """Return how the plan's recipe differs from the record in the folder; nothing if that cannot be read."""
    return record_changes(read_record(folder), plan.record)
