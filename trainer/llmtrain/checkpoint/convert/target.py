"""The target folder of a conversion, which appears only when it is complete."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmtrain_data.sync import sync_folder

from llmtrain.errors import BadInputError, RunFailedError


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder to write into, which is renamed to `target` at the end, or deleted after an error.

    Raises BadInputError if `target` exists already, RunFailedError if it cannot be written or made durable.
    """
    refuse_existing(target)
    partial = target.with_name(target.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            yield partial
            sync_folder(partial)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise RunFailedError(f"{error.filename or target} cannot be written: {error.strerror}") from error
    try:
        sync_folder(target.parent)
    except OSError as error:
        raise RunFailedError(
            f"{target} is complete, but may not survive a power failure: {target.parent}: {error.strerror}"
        ) from error


def refuse_existing(target: Path) -> None:
    """Raise BadInputError if `target` exists and is not an empty folder, or cannot be replaced by a new one."""
    if target.exists() and (not target.is_dir() or any(target.iterdir()) or target.samefile(Path.cwd())):
        raise BadInputError(f"{target} exists already; give a folder that does not exist, or remove it")
    if target.is_mount():
        raise BadInputError(f"{target} is where a volume is mounted; give a folder in it, such as {target / 'model'}")
