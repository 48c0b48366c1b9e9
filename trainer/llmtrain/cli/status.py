"""`llmtrain status`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from llmtrain_data.output import say_json, say_table

from llmtrain.cli.arguments import Json


def status(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN_DIR]...", help="Folders of runs, or their parent folders.", show_default="runs"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the progress of runs and the state of their jobs."""
    from llmtrain_data import units

    from llmtrain.errors import BadInputError
    from llmtrain.launch.status import statuses

    if not runs and not Path("runs").is_dir():
        raise BadInputError("there is no folder runs here; give the folder of a run, or of runs (logging.dir)")
    found = statuses(runs or [Path("runs")])
    if as_json:
        say_json([asdict(run) for run in found])
        return
    rows = []
    for run in found:
        step = "-" if run.step is None else f"{run.step}/{run.steps or '?'}"
        loss = "-" if run.loss is None else f"{run.loss:.4f}" if abs(run.loss) < 1e6 else f"{run.loss:.4g}"
        left = "-" if run.seconds_left is None else units.duration(run.seconds_left)
        rows.append((run.name, run.state, step, loss, left, run.job or "-", run.detail))
    say_table(("run", "state", "step", "loss", "left", "job", ""), rows)
