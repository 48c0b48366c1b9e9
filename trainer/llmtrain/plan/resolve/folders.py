"""The folders and files that a recipe names, and whether its run has begun. No torch in here."""

import os
from collections.abc import Sequence
from pathlib import Path

from llmtrain_data.prefix import prefix_advice

from llmtrain.errors import BadInputError
from llmtrain.recipe.schema import Recipe
from llmtrain.yaml.near_folder import near_folder


def check_folders(recipe: Recipe, others: Sequence[Path] = ()) -> None:
    """Check that the folders and files that a recipe names exist. others: folders that its paths may be relative to
    instead, for the advice in errors. Raises BadInputError."""
    _expect_folder("data.tokenizer", recipe.data.tokenizer, "one that `llmtrain data tokenizer` made", others)
    if not has_begun(recipe):
        _expect_folder("model.hf", recipe.model.hf, "a Hugging Face model, downloaded", others)
        if recipe.checkpoint.resume not in ("auto", "never"):
            expected = "that of a run or a checkpoint, or auto or never"
            _expect_folder("checkpoint.resume", recipe.checkpoint.resume, expected)
        _expect_folder("checkpoint.weights", recipe.checkpoint.weights, "that of a run or a checkpoint", others)
    for key, prefix in recipe.data.sets():
        for suffix in (".bin", ".idx"):
            if os.path.isfile(f"{prefix}{suffix}"):
                continue
            if os.path.exists(f"{prefix}{suffix}"):
                raise BadInputError(f"data.{key} is {prefix}, but {prefix}{suffix} is not a regular file")
            advice = found_elsewhere(prefix, suffix, others) or prefix_advice(Path(prefix))
            raise BadInputError(f"data.{key} is {prefix}, but there is no file {prefix}{suffix}; {advice}")
    _expect_writable(Path(recipe.logging.dir), recipe.name)


def has_begun(recipe: Recipe) -> bool:
    """Return whether a recipe's run has checkpoints. It resumes from them; the folder that it started from may be
    gone."""
    return any(Path(recipe.logging.dir, recipe.name, "checkpoints").glob("step-*[0-9]"))


def found_elsewhere(path: str, suffix: str, folders: Sequence[Path]) -> str:
    """Return advice that names the one of `folders` in which a relative path exists; empty if it exists in none."""
    for folder in folders:
        if not Path(path).is_absolute() and os.path.exists(folder / f"{path}{suffix}"):
            return f"there is one in {folder}: run from there, or give {folder / path}"
    return ""


def _expect_folder(key: str, value: str | None, what: str, others: Sequence[Path] = ()) -> None:
    if value is not None and not Path(value).is_dir():
        near = near_folder(Path(value))
        advice = found_elsewhere(value, "", others) or (f"did you mean {near}?" if near else f"expected {what}")
        raise BadInputError(f"{key} is {value}, which is not a folder; {advice}")


def _expect_writable(folder: Path, name: str) -> None:
    first = "".join(folder.parts[:1])
    # The run would make a folder of that name.
    if (first == "~" or first.startswith("$")) and not os.path.lexists(first):
        raise BadInputError(
            f"logging.dir is {folder}, but {first} stands for no other folder in a recipe; write out the whole path"
        )
    target = folder / name
    nearest = next(
        path for path in (target, *target.parents) if os.path.lexists(path) or path == Path(target.anchor or ".")
    )
    if not nearest.is_dir():
        raise BadInputError(f"logging.dir is {folder}, but {nearest} is a file; expected a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise BadInputError(f"logging.dir is {folder}, but {nearest} may not be written to; choose another folder")
