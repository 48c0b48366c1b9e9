"""`llmtrain plan`: what a run will take, before it starts."""

from pathlib import Path
from typing import Annotated

import typer
from llmtrain_data.output import Terminal, say_json

from llmtrain.cli.arguments import RankCount, RecipeName


def plan(
    recipe: RecipeName,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as zero.stage=3.")
    ] = None,
    ranks: RankCount = None,
    png: Annotated[Path | None, typer.Option(help="Draw the memory to this file.", metavar="FILE")] = None,
    force: Annotated[bool, typer.Option("--force", help="Succeed even if the run does not fit its memory.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show the memory that a run will take on each rank, and the bytes that it sends in a step, before it starts.

    It needs neither the data nor the machines. A run that does not fit the memory of the cluster file is an error that
    names a change with which it fits.
    """
    from llmtrain.errors import BadInputError
    from llmtrain.plan.view import parts, view_recipe

    if png is not None and png.suffix.lower() != ".png":
        raise BadInputError(f"--png is {png}; name a file that ends in .png")
    view = view_recipe(recipe, overrides or [], ranks)
    if png is not None:
        from llmtrain.plan.figure import memory_figure

        try:
            png.write_bytes(memory_figure(view))
        except OSError as error:
            raise BadInputError(f"--png is {png}, which cannot be written ({error.strerror})") from None
    if as_json:
        say_json(view.as_data())
    else:
        console = Terminal()
        for part in parts(view):
            console.print(part)
    if view.problem is not None and not force:
        raise BadInputError(view.problem)
