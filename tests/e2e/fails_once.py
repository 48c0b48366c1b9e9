"""Run llmtrain's command, with a bug in the fifth step of rank 1 unless torchrun has started the ranks again."""

import os
import sys

from llmtrain.cli.main import main
from llmtrain.training import loop
from llmtrain.training.run import Run

train_step = loop.train_step


def failing(run: Run, step: int) -> bool:
    if run.ranks.rank == 1 and step == 4:
        raise ValueError("some bug")
    return train_step(run, step)


if __name__ == "__main__":
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        loop.train_step = failing
    sys.exit(main())
