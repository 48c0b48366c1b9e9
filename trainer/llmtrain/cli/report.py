"""`llmtrain report`: the metrics of a run as images and an HTML page."""

from pathlib import Path
from typing import Annotated

import typer
from llmtrain_data.output import say
from llmtrain_data.waiting import loading


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, finished or not.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder to write to.", metavar="DIR", show_default="RUN_DIR/report")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
) -> None:
    """Draw a run's loss, rate and memory as PNG files and one HTML page."""
    with loading("matplotlib"):
        from llmtrain.telemetry.report import write_report

    page = write_report(run_dir, output)
    say(page)
    if open_page:
        typer.launch(str(page))
