"""`llmtrain submit`."""

from pathlib import Path
from typing import Annotated

import typer
from llmtrain_data.output import say, say_json

from llmtrain.cli.arguments import Json, RecipeName


def submit(
    recipe: RecipeName,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as train.steps=100.")
    ] = None,
    site: Annotated[
        Path | None,
        typer.Option(help="The site's profile.", metavar="FILE", show_default="~/.config/llmtrain/site.yaml"),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes to ask for.", metavar="N", show_default="from the recipe")
    ] = None,
    chain: Annotated[int, typer.Option(min=1, max=1000, help="Jobs in a row, until the run is done.", metavar="N")] = 1,
    array: Annotated[
        str | None, typer.Option(metavar="SEEDS", help="A run for each seed, such as 0-3 or 0-9%2.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Submit even if the plan does not fit the memory of the cluster file.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, print the batch script, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Submit a run to Slurm: render its batch script, submit it, and print the job number and the log file."""
    from llmtrain.launch.slurm.script import render
    from llmtrain.launch.submit import load_site
    from llmtrain.launch.submit import submit as hand_in
    from llmtrain.start.job import plan_job

    profile = load_site(site)
    job = plan_job(recipe, overrides or [], profile, nodes, array, chain, force)
    if not profile.says_gpus:
        say(
            "llmtrain: the site's profile asks Slurm for no GPUs, so on most clusters the job sees none and trains on "
            "CPUs; set gpus_per_node there, or to 0 if this is meant",
            err=True,
        )
    for remark in job.remarks:
        say(f"llmtrain: {remark}", err=True)
    if dry_run:
        script = render(job, profile)
        if as_json:
            say_json(
                {
                    "name": job.name,
                    "folder": str(job.folder),
                    "nodes": job.allocation.nodes,
                    "ranks_per_node": job.allocation.ranks_per_node,
                    "recipe": job.recipe.text,
                    "script": script,
                }
            )
        else:
            say(script, end="")
        return
    jobs = [(number, str(job.log).replace("%j", number).replace("%A", number)) for number in hand_in(job, profile)]
    if as_json:
        say_json([{"job": number, "log": log} for number, log in jobs])
        return
    for number, log in jobs:
        say(f"job {number} on {job.allocation.nodes} x {job.allocation.ranks_per_node} ranks, log {log}")
