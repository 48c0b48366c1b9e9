"""A running run deletes its older checkpoints, also those that another command reads."""

from pathlib import Path

from llmtrain.checkpoint.plain_file import DamagedError
from llmtrain.errors import RunFailedError


class DeletedError(RunFailedError):
    """A run has deleted the checkpoint while it was read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"the checkpoint {folder} is gone: its run has newer ones and has deleted it (checkpoint.keep); give a "
            "newer one"
        )


def failure_of(folder: Path, damage: DamagedError) -> RunFailedError:
    """Return the error of a command that found `damage` in the checkpoint in `folder`."""
    if not folder.is_dir():
        return DeletedError(folder)
    return RunFailedError(f"the checkpoint {folder} is damaged: {damage}")
