"""`llmtrain plan`: what a run will take, before it starts."""

from dataclasses import replace
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
    program: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="RANK", help="Show in what order this rank gathers, drops and sends in a step instead."
        ),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw the memory, or the program, to this file.", metavar="FILE")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Succeed even if the run does not fit its memory.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show the memory that a run will take on each rank, and the bytes that it sends in a step, before it starts.

    It needs neither the data nor the machines. A run that does not fit the memory of the cluster file is an error that
    names a change with which it fits.
    """
    from llmtrain.checkpoint.folder import check_origin
    from llmtrain.errors import BadInputError
    from llmtrain.plan.program.in_order import InOrder
    from llmtrain.plan.views.view import view_recipe
    from llmtrain.plan.views.view_tables import parts

    if png is not None and png.suffix.lower() != ".png":
        raise BadInputError(f"--png is {png}; name a file that ends in .png")
    view = view_recipe(recipe, overrides or [], ranks)
    view = replace(view, advice=[*check_origin(view.plan), *view.advice])
    ordered = None if program is None else InOrder.of(view.plan, program)
    if png is not None:
        # matplotlib takes long to import.
        from llmtrain.plan.views.figure import memory_figure
        from llmtrain.plan.views.program_figure import program_figure

        try:
            png.write_bytes(memory_figure(view) if ordered is None else program_figure(ordered))
        except OSError as error:
            raise BadInputError(f"--png is {png}, which cannot be written ({error.strerror})") from None
    if as_json:
        say_json((ordered or view).as_data())
    else:
        console = Terminal()
        for part in parts(view) if ordered is None else ordered.lines():
            console.print(part, soft_wrap=ordered is not None)
    if view.problem is not None and not force:
        raise BadInputError(view.problem)
