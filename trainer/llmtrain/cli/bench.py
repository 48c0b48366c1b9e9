"""`llmtrain bench`: measure the links of a cluster."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Measure the links of a cluster.")


@app.callback()
def _group() -> None:
    """Keep `comm` a subcommand, though it is the only one."""


@app.command()
def comm(
    cluster: Annotated[
        str | None,
        typer.Option(help="A description to start from: its file or name.", metavar="FILE", show_default="detected"),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=2, help="Ranks to start on this machine.", metavar="N", show_default="one for each GPU"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the measured description to this file, for `cluster:`.", metavar="FILE")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw times and rates into this PNG file.", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every size.")] = False,
) -> None:
    """Measure latency and bandwidth between ranks: inside a node, over each network card, and between clusters.

    Start it as a run is started: through torchrun, srun, mpirun or --nproc.
    """
    from llmtrain.launch.bench_comm import CommBench, bench_comm

    bench_comm(CommBench(cluster, output, plot, as_json), nproc)
