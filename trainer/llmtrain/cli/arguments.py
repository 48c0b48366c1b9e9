"""Arguments that several commands take."""

from typing import Annotated, Literal

import typer

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.")]
RankCount = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of ranks.", metavar="N", show_default="those of the cluster file, else one replica"
    ),
]
DTypeName = Literal["auto", "fp32", "bf16", "fp16"]
DType = Annotated[
    DTypeName,
    typer.Option("--dtype", help="Of weights and computation; auto is that of the run on a GPU, and fp32 on a CPU."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
