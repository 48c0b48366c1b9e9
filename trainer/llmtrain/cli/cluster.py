"""`llmtrain cluster`: a cluster, and where a run's groups of ranks are on it."""

from typing import Annotated

import typer
from llmtrain_data.output import Terminal, say_json

app = typer.Typer(no_args_is_help=True, help="Show a cluster, and where a run's groups of ranks are on it.")


@app.callback()
def _group() -> None:
    """Keep `show` a subcommand, though it is the only one."""


@app.command()
def show(
    source: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE_OR_CLUSTER]", help="File or name of a recipe or a cluster description."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as parallel.pipeline=2.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks.", metavar="N", show_default="all that are described")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every group.")] = False,
) -> None:
    """Show the tiers of links, the clusters, and each group of ranks with its place and network card."""
    from llmtrain.plan.resolve.cluster_source import topology_of
    from llmtrain.plan.views.cluster_view import describe, tables

    found = describe(topology_of(source, overrides or [], ranks))
    if as_json:
        say_json(found)
        return
    console = Terminal()
    for part in tables(found):
        console.print(part)
