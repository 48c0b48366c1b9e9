"""The folder of checkpoints: names, and atomic creation and deletion.

`step-00000100` is complete. `step-00000100.partial` is being written, `.pruned` is being deleted, and `.replaced` gives
way to a new checkpoint of the same step. A killed process may leave these three behind, and the next process removes
them.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from llmtrain_data.sync import sync_folder

from llmtrain.checkpoint.manifest import (
    MANIFEST,
    SIDECAR,
    STEP_FOLDER,
    Manifest,
    check,
    check_model,
    encode,
    read_manifest,
)
from llmtrain.checkpoint.plain_file import DamagedError
from llmtrain.checkpoint.safetensors_file import DurableFile
from llmtrain.errors import BadInputError
from llmtrain.model.hf_config import CONFIG
from llmtrain.plan.checkpointing import Checkpointing, Origin
from llmtrain.plan.plan import Plan
from llmtrain.yaml.near_folder import expect_run_folder

_LEFTOVERS = (".partial", ".pruned", ".replaced")


def step_name(step: int) -> str:
    """Return the name of the folder of `step`'s checkpoint."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of a complete checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def step_folders(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first; none if it does not exist. They may still be damaged.
    Raises OSError if it cannot be listed."""
    return sorted((path for path in _folders(folder) if STEP_FOLDER.fullmatch(path.name)), key=step_of)


def _folders(folder: Path) -> list[Path]:
    # Path.glob hides errors: a run would not find its checkpoints, and start again.
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints at `path`, newest first.

    path: the folder of a run, its `checkpoints`, or one checkpoint. Raises BadInputError if it does not exist, OSError
    if it cannot be listed.
    """
    expect_run_folder(path, "give the folder of a run or of a checkpoint")
    if (path / MANIFEST).exists() or STEP_FOLDER.fullmatch(path.name):
        return [path]
    return step_folders(path / "checkpoints" if (path / "checkpoints").is_dir() else path)[::-1]


def check_start(saving: Checkpointing, own: Path) -> None:
    """Check that a run may start from what its recipe says. own: the folder of its own checkpoints. Raises
    BadInputError."""
    if step_folders(own) and not saving.resumes:
        raise BadInputError(begun_before(own))
    _checkpoints_of_origin(saving, own)


def check_origin(plan: Plan) -> list[str]:
    """Check that a run's model is that of the other run that it starts from, if that is on this machine; return
    sentences about what differs, as `check_model` does. Reads manifests only. Raises BadInputError."""
    saving, own = plan.checkpoint, Path(plan.logging.dir, plan.name, "checkpoints")
    if saving.origin is None or not saving.origin.folder.is_dir():
        return []
    for folder in _checkpoints_of_origin(saving, own):
        # The run skips a damaged checkpoint, and says so.
        with suppress(DamagedError):
            return check_model(folder, read_manifest(folder), plan.model, saving.origin.alone)
    return []


def _checkpoints_of_origin(saving: Checkpointing, own: Path) -> list[Path]:
    """Return the checkpoints, newest first, of the other run that a run starts from; none if it has its own."""
    if saving.origin is None or step_folders(own):
        return []
    found = find_checkpoints(saving.origin.folder)
    if not found:
        raise BadInputError(nothing_in(saving.origin))
    return found


def begun_before(own: Path) -> str:
    """Return a sentence about a folder with checkpoints, of a run that is never to resume."""
    return f"{own} holds checkpoints and checkpoint.resume is never; give the run another name"


def nothing_in(origin: Origin) -> str:
    """Return a sentence about a folder without checkpoints, from which a run is to start."""
    theirs = (origin.folder / CONFIG).is_file()
    advice = "it is a Hugging Face folder, which model.hf takes" if theirs else "expected a run's folder"
    return f"{origin.key} is {origin.folder}, which holds no checkpoint; {advice}"


def commit(partial: Path, final: Path, manifest: Manifest) -> None:
    """Write the manifest beside the shard files, and rename the folder to `final`, which replaces an older checkpoint.

    The checkpoint is there on return, and durable after a `sync_folder` of its parent. An older one stays as
    `.replaced`. Raises OSError, and DamagedError if the shard files do not cover all tensors or the manifest is too
    large.
    """
    check(manifest)
    for name, content in zip((MANIFEST, SIDECAR), encode(manifest), strict=True):
        with DurableFile(partial / name) as file:
            file.write(content)
    sync_folder(partial)
    if final.exists():
        final.rename(final.with_name(final.name + ".replaced"))
    partial.rename(final)


def prune(folder: Path, step: int, keep: int, also: int | None = None) -> None:
    """Delete all but the `keep` newest checkpoints up to `step`, and that of the step `also`; checkpoints of later
    steps are not this run's.

    Also deletes replaced checkpoints, and what an earlier call could not delete. Raises OSError: on NFS, a folder stays
    while a program has one of its files open.
    """
    upto = [path for path in step_folders(folder) if step_of(path) <= step]
    _drop(folder, [path for path in upto[:-keep] if step_of(path) != also])
    for path in _leftovers(folder):
        if path.suffix == ".pruned" or (path.suffix == ".replaced" and path.with_suffix("").exists()):
            shutil.rmtree(path)


def drop_later(folder: Path, step: int) -> None:
    """Delete the checkpoints of steps after `step`. Raises OSError if they stay checkpoints."""
    _drop(folder, [path for path in step_folders(folder) if step_of(path) > step])
    clean(folder)


def _drop(folder: Path, paths: list[Path]) -> None:
    """Rename checkpoints, so that they are none any more and can be deleted file by file."""
    for path in paths:
        path.rename(path.with_name(path.name + ".pruned"))
    if paths:
        sync_folder(folder)


def clean(folder: Path) -> None:
    """Remove the leftovers of killed saves, and restore a checkpoint that had to give way to one that is incomplete."""
    for path in _leftovers(folder):
        if path.suffix == ".replaced" and not path.with_suffix("").exists():
            path.rename(path.with_suffix(""))
        else:
            shutil.rmtree(path, ignore_errors=True)


def _leftovers(folder: Path) -> list[Path]:
    return [path for path in _folders(folder) if STEP_FOLDER.fullmatch(path.stem) and path.suffix in _LEFTOVERS]
