"""`llmtrain logs`."""

from pathlib import Path
from typing import Annotated

import typer
from llmtrain_data.output import say


def logs(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or its name in the folder runs.")],
    job: Annotated[
        str | None, typer.Option(help="Number of the job.", metavar="JOB", show_default="the newest that has started")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job has ended.")] = False,
) -> None:
    """Print the log of a run's newest Slurm job, with control characters escaped; the log file is RUN/slurm/JOB.log."""
    from llmtrain.launch.status import read_log, run_folder

    for text in read_log(run_folder(run), job, follow):
        say(text, end="")
