"""Arguments that several commands take."""

from typing import Annotated

import typer

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.")]
RankCount = Annotated[
    int | None,
    typer.Option(min=1, help="Number of ranks.", metavar="N", show_default="all that are described, or one replica"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
