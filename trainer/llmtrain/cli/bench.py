"""`llmtrain bench`: measure the links, the memory and the volumes of a cluster."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Measure the links, memory and volumes of a cluster.")


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


@app.command()
def memory(
    cluster: Annotated[
        str | None,
        typer.Option(
            help="A description to start from: its file or name.",
            metavar="FILE",
            show_default="--output's, or detected",
        ),
    ] = None,
    paths: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder on a volume; give one for each volume.",
            metavar="FOLDER",
            show_default="those of the description's node.nvme",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds for all measurements of volumes.", metavar="N")
    ] = 15.0,
    output: Annotated[
        Path | None, typer.Option(help="Write the measured description to this file, for `cluster:`.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every measurement.")] = False,
) -> None:
    """Measure copies within the host's memory and to a GPU, AdamW on the CPU, and volumes: one by one and together.

    Start it once on a machine, without ranks. Volumes are measured past the page cache, by block size and queue depth;
    each needs 256 MiB for a file, which has no name and is gone afterwards.
    """
    from llmtrain.launch.bench_memory import MemoryBench, bench_memory

    bench_memory(MemoryBench(cluster, tuple(paths or ()), seconds, output, as_json))
