"""`llmtrain run`."""

from typing import Annotated

import typer

from llmtrain.cli.arguments import RecipeName


def run(
    recipe: RecipeName,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as train.steps=100.")
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks to start on this machine.", metavar="N", show_default="one for each GPU, else one"
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and print the resolved recipe, then stop.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Run even if the plan does not fit the memory.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run, print JSON.")] = False,
) -> None:
    """Train: start the run that a recipe describes, or resume it from its last checkpoint."""
    from llmtrain.start.run import start

    start(recipe, overrides or [], nproc, dry_run, as_json, force)
