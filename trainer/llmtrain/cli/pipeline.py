"""`llmtrain pipeline`: how the stages of a pipeline work together."""

from pathlib import Path
from typing import Annotated

import typer
from llmtrain_data.output import Terminal, say_json

app = typer.Typer(no_args_is_help=True, help="Show how the stages of a recipe's pipeline work together.")


@app.callback()
def pipeline() -> None:
    """Show how the stages of a recipe's pipeline work together."""


@app.command()
def show(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as parallel.pipeline=4.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks of the run.", metavar="N", show_default="all that are described, or one replica"
        ),
    ] = None,
    flops: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="What a rank computes in a second, such as 150TFLOP/s: then time is in seconds, and messages between "
            "stages take theirs by the description of the cluster.",
        ),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the timeline into this file.", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Draw the timeline of a step, with its split, waiting and memory. Stages take as long as their FLOPs say."""
    from llmtrain.errors import BadInputError
    from llmtrain.plan.pipeline.draw import print_view
    from llmtrain.plan.pipeline.view import show_recipe

    if png is not None and png.suffix.lower() != ".png":
        raise BadInputError(f"--png is {png}; name a file that ends in .png")
    view = show_recipe(recipe, overrides or [], ranks, flops)
    if png is not None:
        from llmtrain.plan.pipeline.figure import timeline_figure

        try:
            png.write_bytes(timeline_figure(view))
        except OSError as error:
            raise BadInputError(f"--png is {png}, which cannot be written ({error.strerror})") from None
    if as_json:
        say_json(view.as_data())
    else:
        print_view(view, Terminal())
