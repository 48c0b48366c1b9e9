"""Describe a checkpoint's content as plain data, for people and for JSON."""

from math import prod
from pathlib import Path
from typing import Any

from llmtrain_data.untrusted import reason

from llmtrain.checkpoint.deleted import failure_of
from llmtrain.checkpoint.folder import find_checkpoints
from llmtrain.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from llmtrain.checkpoint.plain_file import DamagedError, patiently
from llmtrain.errors import BadInputError
from llmtrain.model.hf_config import CONFIG


def list_checkpoints(path: Path) -> list[dict[str, Any]]:
    """Return step, tokens, bytes and folder of each checkpoint, newest first; of a damaged one, folder and `damage`; of
    one whose manifest the file system does not give, folder and `unreadable`.

    path: the folder of a run or of a checkpoint. Reads manifests only. Raises BadInputError if there is none.
    """
    rows = []
    for folder in existing(path):
        try:
            manifest = read_manifest(folder)
            rows.append(_summary(folder, manifest))
        except DamagedError as error:
            # Its run may have deleted it since.
            if folder.is_dir():
                rows.append({"folder": str(folder), "damage": str(error)})
        except OSError as error:
            rows.append({"folder": str(folder), "unreadable": f"{MANIFEST}: {reason(error)}"})
    return rows


def inspect_checkpoint(path: Path) -> dict[str, Any]:
    """Return everything but the tensors' values of a checkpoint, or of a run's newest checkpoint.

    Raises BadInputError if there is none, RunFailedError if its manifest is damaged.
    """
    folder = existing(path)[0]
    try:
        manifest = patiently(folder / MANIFEST, lambda: read_manifest(folder))
    except DamagedError as error:
        raise failure_of(folder, error) from error
    return _summary(folder, manifest) | {
        "files": {name: entry.bytes for name, entry in manifest.files.items()},
        "tensors": {
            name: {
                "shape": entry.shape,
                "ranges": [[p.start, p.end, p.file] for p in next(iter(entry.states.values()), [])],
            }
            for name, entry in manifest.tensors.items()
        },
        "progress": manifest.progress,
        "model": manifest.model,
        "recipe": manifest.recipe,
    }


def existing(path: Path) -> list[Path]:
    """Return the checkpoints that `find_checkpoints` finds. Raises BadInputError if there is none."""
    found = find_checkpoints(path)
    if not found and (path / CONFIG).is_file():
        raise BadInputError(
            f"{path} is a Hugging Face folder; make a checkpoint of it with `llmtrain ckpt convert {path} FOLDER`, and "
            "give that folder"
        )
    if not found:
        runs = [child for child in sorted(path.iterdir()) if (child / "checkpoints").is_dir()]
        advice = f"did you mean {runs[0]}?" if runs else "give the folder of a run or of a checkpoint"
        raise BadInputError(f"{path} holds no checkpoint; {advice}")
    return found


def _summary(folder: Path, manifest: Manifest) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "tokens": _tokens(manifest),
        "parameters": sum(prod(entry.shape) for entry in manifest.tensors.values()),
        "states": sorted(manifest.states),
        "bytes": manifest.nbytes,
        "folder": str(folder),
    }


def _tokens(manifest: Manifest) -> int | None:
    """Return the tokens trained on so far, or None for a checkpoint without a recipe."""
    if isinstance(counted := manifest.progress.get("tokens"), int):
        return counted
    train, data = manifest.recipe.get("train"), manifest.recipe.get("data")
    if not isinstance(train, dict) or not isinstance(data, dict):
        return None
    batch, length = train.get("global_batch"), data.get("sequence_length")
    return manifest.step * batch * length if isinstance(batch, int) and isinstance(length, int) else None
