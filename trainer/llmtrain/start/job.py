"""From a recipe and a site's profile to the job that `llmtrain submit` hands to Slurm. No torch in here."""

import re
import sys
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

from llmtrain_data import units
from omegaconf import OmegaConf

from llmtrain.checkpoint.folder import check_origin
from llmtrain.cluster.description import Cluster
from llmtrain.cluster.load import find_cluster, given_cluster
from llmtrain.cluster.topology import check_world
from llmtrain.errors import BadInputError
from llmtrain.launch.measure.result import as_data
from llmtrain.launch.slurm.config import LARGEST_MARGIN, Site
from llmtrain.launch.slurm.script import Allocation, Array, BatchJob, Chain, SubmittedRecipe
from llmtrain.launch.submit import default_site
from llmtrain.plan.cost.stop_time import stop_time
from llmtrain.plan.facts import Facts
from llmtrain.plan.flops import computes_bf16, is_amd
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.check import check, check_given
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.prepare import check_recipe, folders_above, named_facts
from llmtrain.plan.resolve.refusal import refusal
from llmtrain.recipe.load import parse_recipe, read_recipe, recipe_files
from llmtrain.recipe.schema import Recipe
from llmtrain.yaml.file import check_size
from llmtrain.yaml.yaml11 import as_meant


def plan_job(
    name: str,
    overrides: Sequence[str],
    site: Site,
    nodes: int | None = None,
    array: str | None = None,
    chain: int = 1,
    force: bool = False,
) -> BatchJob:
    """Check a recipe for its job's ranks, and return the job. Raises BadInputError; writes nothing.

    name: of a recipe, or its file. nodes: None for the recipe's number. array: seeds. chain: jobs in a row.
    force: also submit what does not fit the memory that the cluster file states.
    """
    if array is not None and chain > 1:
        raise BadInputError("--chain and --array are both given; leave out --chain, as jobs of an array are requeued")
    given = read_recipe(name, overrides)
    recipe = parse_recipe(given, recipe_files(name))
    if recipe.checkpoint.resume == "never":
        raise BadInputError(
            "checkpoint.resume is never, but a job that is stopped and queued again resumes from its checkpoints; "
            "leave checkpoint.resume out"
        )
    allocation = _allocation(recipe, site, nodes)
    _check_node(recipe, site, allocation)
    check_world(allocation.ranks)
    plan = None
    remarks = list[str]()
    if site.container is None:
        check_recipe(recipe, folders_above(name))
        plan = _checked_plan(recipe, named_facts(recipe, _facts(recipe, allocation)), force)
        remarks = check_origin(plan)
    elif recipe.model.hf is None and (recipe.data.tokenizer is None or recipe.model.vocab not in (None, "auto")):
        # The container has the files; without them, the model's shape is still known.
        check_given(recipe)
        plan = _checked_plan(recipe, _facts(recipe, allocation), force)
    folder = Path(recipe.logging.dir, recipe.name).absolute()
    if "%" in str(folder):
        raise BadInputError(
            f"the run's folder is {folder}; Slurm needs a log's path without %, so set another logging.dir or name"
        )
    python = site.python or ("python" if site.container else sys.executable)
    # srun sets no rank for a single task, and `llmtrain run` would then start a rank for each GPU.
    alone = ["--nproc", "1"] if allocation.ranks == 1 else []
    command = (python, "-P", "-m", "llmtrain", "run", *alone, *(["--force"] if force else []))
    submitted = SubmittedRecipe(_as_submitted(given, recipe), _sources(name, recipe))
    series = Chain(chain) if array is None else Array(array)
    remark = None if plan is None else _short_margin(plan, site.margin)
    return BatchJob(
        name=recipe.name,
        folder=folder,
        allocation=allocation,
        command=command,
        recipe=submitted,
        series=series,
        restarts=recipe.train.max_restarts,
        remarks=(*remarks, *filter(None, [remark])),
    )


def _facts(recipe: Recipe, allocation: Allocation) -> Facts:
    cluster = given_cluster(recipe.cluster)
    accelerator = None if cluster is None else cluster.accelerator
    # This machine may differ from the job's nodes, so assume that these have GPUs and apex.
    return Facts(
        world=allocation.ranks,
        device="cuda",
        ranks_per_node=allocation.ranks_per_node,
        apex=True,
        bf16=computes_bf16(accelerator),
        amd=accelerator is not None and is_amd(accelerator.name or ""),
        cluster=cluster,
    )


def _checked_plan(recipe: Recipe, facts: Facts, force: bool) -> Plan:
    """Return the plan of a recipe. force: also take what does not fit the stated memory. Raises BadInputError."""
    made = make_plan(recipe, facts)
    check(made, facts)
    if not force and (problem := refusal(recipe, facts, made)):
        raise BadInputError(problem)
    return made


def _short_margin(plan: Plan, margin: int) -> str | None:
    """Return a sentence if a run may not have saved within the margin at the end of its time, else None."""
    stop = stop_time(plan)
    if stop is None or stop.seconds <= margin:
        return None
    # Steps take longer than the peaks allow.
    wanted = min(ceil(2 * stop.seconds / 60) * 60, LARGEST_MARGIN)
    return (
        f"the site's margin is {margin} seconds, in which the run may not have saved when its time ends: two steps "
        f"take at least {units.seconds(stop.steps)}, and writing a checkpoint of {units.size(stop.nbytes)} takes "
        f"{units.seconds(stop.save)} at 1 GB/s from each node; set margin: {wanted} in the site's profile"
    )


def _sources(name: str, recipe: Recipe) -> tuple[Path, ...]:
    """Return the files of a submitted recipe: its own, those that it extends, and its cluster description."""
    cluster = recipe.cluster
    described = [] if isinstance(cluster, Cluster) or cluster == "auto" else [find_cluster(cluster)]
    return (*recipe_files(name), *described)


def _as_submitted(given: dict[str, Any], recipe: Recipe) -> str:
    """Return a recipe as YAML that needs no other recipe or cluster file; `auto` stays, as the job's nodes decide it.
    Raises BadInputError if the job could not read the text."""
    given = as_meant(given, Recipe)
    if (cluster := given_cluster(recipe.cluster)) is not None:
        given["cluster"] = as_data(cluster)
    text = OmegaConf.to_yaml(OmegaConf.create(given))
    try:
        # Each file was small enough, but together they may be too large.
        check_size(text)
    except ValueError as error:
        raise BadInputError(
            f"{recipe.name} cannot be submitted with all that it extends and its cluster's description: {error}; "
            "make one of them shorter"
        ) from error
    return text


def _allocation(recipe: Recipe, site: Site, nodes: int | None) -> Allocation:
    """Return the nodes for a run. Raises BadInputError if nothing gives their number or their ranks."""
    parallel, cluster = recipe.parallel, given_cluster(recipe.cluster)
    per_node = site.ranks_per_node or (cluster.node.ranks if cluster else _gpus(site))
    model = parallel.tensor * parallel.pipeline
    wanted = None if parallel.data == "auto" else model * parallel.data
    if per_node is None:
        if wanted != 1:
            raise BadInputError(
                f"nothing says how many ranks a node has; set ranks_per_node in {default_site()} or in the "
                "file of --site, or set the recipe's `cluster`"
            )
        per_node = 1
    if nodes is not None:
        return Allocation(nodes, per_node)
    if wanted is None:
        raise BadInputError(
            "parallel.data is auto, so nothing says how many nodes to ask for; add --nodes N, or set parallel.data"
        )
    if wanted <= per_node:
        return Allocation(1, wanted)
    if wanted % per_node:
        raise BadInputError(
            f"parallel.data x pipeline x tensor is {wanted} ranks, which do not fill nodes of {per_node}; set "
            f"parallel.data so that they do, or add --nodes N with parallel.data=auto"
        )
    return Allocation(wanted // per_node, per_node)


def _check_node(recipe: Recipe, site: Site, allocation: Allocation) -> None:
    """Check that the nodes of the recipe's cluster are parts of the site's. Raises BadInputError."""
    cluster, ranks = given_cluster(recipe.cluster), site.ranks_per_node
    if ranks and cluster is not None and allocation.nodes > 1 and ranks % cluster.node.ranks:
        raise BadInputError(
            f"ranks_per_node is {ranks} in the site's profile, but cluster.node.ranks is {cluster.node.ranks}; add "
            f"cluster.node.ranks={ranks}, or set ranks_per_node to {cluster.node.ranks}"
        )


def _gpus(site: Site) -> int | None:
    """Return the GPUs per node from a value such as `4` or `a100:4`; None for any other value."""
    number = str(site.gpus_per_node).rpartition(":")[2]
    return int(number) or None if re.fullmatch("[0-9]{1,4}", number) else None
