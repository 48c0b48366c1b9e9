"""The folder of checkpoints: how they are named, how one appears and disappears in a single step.

`step-00000100` is complete. `step-00000100.partial` is being written, `.pruned` is being deleted, `.replaced`
makes room for a new one of the same step; a killed process may leave these behind, and the next one cleans
them up.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from llmtrain.checkpoint.manifest import MANIFEST, SIDECAR, STEP_FOLDER, Manifest, check, encode
from llmtrain.checkpoint.safetensors_file import DurableFile, sync_folder
from llmtrain.errors import BadInputError


def step_name(step: int) -> str:
    """Return the name of the folder of `step`'s checkpoint."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of a complete checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def step_folders(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first. Complete, not necessarily sound."""
    found = [path for path in folder.glob("step-*") if STEP_FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints that `path` stands for, newest first.

    path: the folder of a run, of its `checkpoints`, or of one checkpoint. Raises BadInputError if it does not
    exist.
    """
    if not path.is_dir():
        raise BadInputError(f"{path} is not a folder; give the folder of a run or of a checkpoint")
    if (path / MANIFEST).exists() or STEP_FOLDER.fullmatch(path.name):
        return [path]
    return step_folders(path / "checkpoints" if (path / "checkpoints").is_dir() else path)[::-1]


def commit(partial: Path, final: Path, manifest: Manifest) -> None:
    """Write the manifest beside the parts, and give the checkpoint its name; an older one of that name goes.

    Durable when it returns. Raises OSError, and DamagedError if the parts do not make up all of every tensor.
    """
    check(manifest)
    for name, content in zip((MANIFEST, SIDECAR), encode(manifest), strict=True):
        with DurableFile(partial / name) as file:
            file.write(content)
    sync_folder(partial)
    replaced = final.with_name(final.name + ".replaced")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync_folder(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def prune(folder: Path, step: int, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints up to `step`; those of later steps are not this run's."""
    upto = [path for path in step_folders(folder) if step_of(path) <= step]
    _delete(folder, upto[:-keep])


def drop_later(folder: Path, step: int) -> None:
    """Delete the checkpoints of steps after `step`."""
    _delete(folder, [path for path in step_folders(folder) if step_of(path) > step])


def _delete(folder: Path, paths: Iterable[Path]) -> None:
    for path in paths:
        gone = path.rename(path.with_name(path.name + ".pruned"))
        sync_folder(folder)
        shutil.rmtree(gone)


def clean(folder: Path) -> None:
    """Remove what killed saves left behind, and bring back a checkpoint that was about to be replaced."""
    for path in folder.glob("step-*.*"):
        name, _, suffix = path.name.partition(".")
        if not STEP_FOLDER.fullmatch(name) or suffix not in ("partial", "pruned", "replaced"):
            continue
        if suffix == "replaced" and not (folder / name).exists():
            path.rename(folder / name)
        else:
            shutil.rmtree(path, ignore_errors=True)
