"""`llmtrain pipeline`: the pipeline schedule of a recipe."""

from pathlib import Path
from typing import Annotated

import typer
from llmtrain_data.output import Terminal, say_json

from llmtrain.cli.arguments import RankCount, RecipeName

app = typer.Typer(no_args_is_help=True, help="Show the pipeline schedule of a recipe.")


@app.callback()
def pipeline() -> None:
    """Show the pipeline schedule of a recipe."""


@app.command()
def show(
    recipe: RecipeName,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as parallel.pipeline=4.")
    ] = None,
    ranks: RankCount = None,
    flops: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Speed of a rank, such as 150TFLOP/s. Time is then in seconds and includes messages between stages, "
            "by the description of the cluster.",
        ),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the timeline to this file.", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Draw the timeline of a step, with its layer split, idle time and memory. FLOPs give the times of stages."""
    from llmtrain.errors import BadInputError
    from llmtrain.plan.views.pipeline_drawing import print_view
    from llmtrain.plan.views.pipeline_view import show_recipe

    if png is not None and png.suffix.lower() != ".png":
        raise BadInputError(f"--png is {png}; name a file that ends in .png")
    view = show_recipe(recipe, overrides or [], ranks, flops)
    if png is not None:
        from llmtrain.plan.views.pipeline_figure import timeline_figure

        try:
            png.write_bytes(timeline_figure(view))
        except OSError as error:
            raise BadInputError(f"--png is {png}, which cannot be written ({error.strerror})") from None
    if as_json:
        say_json(view.as_data())
    else:
        print_view(view, Terminal())
