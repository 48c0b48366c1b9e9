"""Opens a trained model for a command. It imports no torch before it is called."""

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain_data.output import say
from llmtrain_data.waiting import Waiting

from llmtrain.checkpoint.describe import existing
from llmtrain.errors import BadInputError
from llmtrain.launch.gpus import triton_problem
from llmtrain.launch.waiting import set_waiting

if TYPE_CHECKING:
    from llmtrain.inference.trained import TrainedModel


def open_trained(source: Path, waiting: Waiting, dtype: str) -> "TrainedModel":
    """Load a checkpoint, or a run's newest sound one, and say on stderr what the user should know about it.

    waiting: shows the progress of the load and of later work with the model. dtype: see `open_model`. Raises
    BadInputError for a wrong folder, before PyTorch is loaded, or where Triton cannot load its kernels for a GPU, and
    RunFailedError if no checkpoint is sound.
    """
    existing(source)
    # PyTorch's threads read from the environment how they wait, when PyTorch is loaded.
    busy = set_waiting(os.environ, ranks=1)
    from llmtrain.comm.device import gpu_count
    from llmtrain.inference.trained import open_model

    gpus = gpu_count()
    if gpus and find_spec("triton") is not None and (problem := triton_problem()):
        raise BadInputError(problem)
    model = open_model(source, _warn, waiting, dtype)
    return model if busy is None or gpus else replace(model, notice=lambda: _warn(f"llmtrain: {busy}"))


def _warn(sentence: str) -> None:
    say(sentence, err=True)
