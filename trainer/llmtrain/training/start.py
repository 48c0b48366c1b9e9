"""From the command line's words to ranks that train."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain_data.output import say_json, say_long
from llmtrain_data.waiting import Waiting, loading

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.topology import stage_speeds
from llmtrain.comm.environment import Launched, heed_launcher, launched
from llmtrain.errors import (
    BadInputError,
)
from llmtrain.launch.ending import ending_as_one
from llmtrain.launch.gpus import check_gpus
from llmtrain.model.hf_config import read_hf_config
from llmtrain.plan.check import advice, memory_problem
from llmtrain.plan.make import make_plan
from llmtrain.plan.plan import Plan
from llmtrain.plan.prepare import check_and_resolve, folders_above
from llmtrain.plan.resolve import Facts, decisions, to_yaml
from llmtrain.plan.summary import summarize
from llmtrain.recipe.load import load_recipe
from llmtrain.recipe.schema import Recipe

if TYPE_CHECKING:
    from llmtrain.comm.ranks import Ranks
    from llmtrain.launch.local import Restarts

# Seconds that ranks leave the first one of their machine to report a bad recipe.
REPORT = 10.0


def start(name: str, overrides: list[str], nproc: int | None, dry_run: bool, as_json: bool = False) -> None:
    """Check a recipe and run it: in this process, on ranks of this machine that are started here, or, where torchrun or
    srun started this process, as one of theirs. dry_run: print the resolved recipe instead, and what is likely wrong
    with it; as_json: as JSON."""
    if as_json and not dry_run:
        raise BadInputError("--json is given without --dry-run; add it, or leave --json out and read metrics.jsonl")
    heed_launcher()
    place = launched(os.environ, nproc)
    with _told_once(place):
        recipe = load_recipe(name, overrides)
    # torch comes this late so that a mistake in the recipe's text is told at once.
    with loading("PyTorch", _speaks(place)):
        import torch
    gpus = torch.cuda.device_count()
    world = place.world if place else nproc or max(1, gpus)
    facts = Facts(
        world=world,
        ranks_per_node=place.ranks_per_node if place else world,
        device="cuda" if gpus else "cpu",
        apex=_has_apex(),
    )
    with _told_once(place):
        resolved = check_and_resolve(recipe, facts, read_hf_config, folders_above(name))
    plan = make_plan(resolved, facts)
    unled = _without_mpi(plan) if place is None else None
    lacking = [sentence for sentence in (unled, memory_problem(resolved, facts)) if sentence]
    if dry_run:
        said = [*advice(resolved, plan), *lacking]
        summary = summarize(recipe, resolved, plan, "GPU" if gpus else "CPU")
        if as_json:
            say_json({"recipe": plan.record, "summary": summary.as_data(), "advice": said})
            return
        # As comments: what is printed stays a recipe.
        say_long("".join((summary.comments(), to_yaml(plan.record), *(f"# {sentence}\n" for sentence in said))))
        return
    check_gpus(gpus, place, world)
    with _told_once(place):
        if lacking:
            raise BadInputError(lacking[0])
    if place is not None or world == 1:
        _run_rank(recipe, resolved, place, replace(facts, cluster=plan.cluster))
    else:
        from llmtrain.launch.local import launch

        launch(world, ["run", name, *overrides], _restarts(recipe, facts))


def _speaks(place: Launched | None) -> bool:
    """Whether it is this process that tells the user how the run starts."""
    return place is None or place.rank == 0


@contextmanager
def _told_once(place: Launched | None) -> Iterator[None]:
    """Have one rank of each machine report what is wrong with the recipe, which is the same for all of them."""
    try:
        yield
    except BadInputError as error:
        if place is None or place.local_rank == 0:
            raise
        # A launcher ends all ranks when one has ended: the one that reports must come first.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(REPORT)
        raise SystemExit(error.exit_code) from error


def _without_mpi(plan: Plan) -> str | None:
    """Return what is missing where nobody has started the ranks of a pipeline whose messages MPI carries."""
    if plan.pipeline.schedule.ranks == 1 or plan.pipeline.transport != "mpi":
        return None
    return (
        "pipeline.transport is mpi, but no MPI has started this run; start it with mpirun -n "
        f"{plan.grid.world} llmtrain run RECIPE, or set pipeline.transport=torch"
    )


def _restarts(recipe: Recipe, facts: Facts) -> "Restarts":
    from llmtrain.checkpoint.folder import step_folders, step_of
    from llmtrain.launch.local import Restarts

    folder = Path(recipe.logging.dir) / recipe.name / "checkpoints"

    def newest() -> int | None:
        found = step_folders(folder)
        return step_of(found[-1]) if found else None

    def fewer(ranks: int) -> int:
        for world in range(ranks - 1, 0, -1):
            with suppress(BadInputError):
                check_and_resolve(recipe, replace(facts, world=world, ranks_per_node=world), read_hf_config)
                return world
        return ranks

    return Restarts(recipe.train.max_restarts, newest, fewer)


def _run_rank(recipe: Recipe, resolved: Recipe, place: Launched | None, facts: Facts) -> None:
    with loading("the trainer", _speaks(place)):
        from llmtrain.comm.ranks import connect, disconnect, watched
        from llmtrain.launch.local import die_with_launcher
        from llmtrain.launch.stop import restore_handlers
        from llmtrain.training.loop import train

    said = []
    if place is not None:
        os.environ.update(place.variables)
        die_with_launcher()
        said.append(f"{place.world} ranks, started by {place.by}")
    plan = make_plan(resolved, facts)
    timeout = timedelta(seconds=plan.training.timeout)
    restore_handlers()
    with Waiting(
        lambda: f"waiting for all {facts.world} ranks to start" if facts.world > 1 else "starting",
        enabled=_speaks(place),
    ):
        ranks = connect(plan.grid, plan.tiers, timeout, plan.cluster, noted=True)
    ranks = ranks if ranks.watchdog is not None else watched(ranks, timeout)
    with ending_as_one(ranks), Waiting(ranks.activity.doing, enabled=ranks.is_main) as waiting:
        if _is_split_by_speed(recipe, plan, facts):
            if (speeds := _measured_speeds(plan, ranks)) is None:
                said.append("stages are equally fast, as measured")
            else:
                shown = ", ".join(f"{speed:.2f}" for speed in speeds)
                said.append(f"speeds of the stages, as measured: {shown}")
                facts = replace(facts, speeds=speeds)
                resolved = check_and_resolve(recipe, facts, read_hf_config)
                plan = make_plan(resolved, facts)
        train(plan, ranks, [*said, *decisions(recipe, resolved), *advice(resolved, plan)], waiting)
    disconnect(ranks)


def _is_split_by_speed(recipe: Recipe, plan: Plan, facts: Facts) -> bool:
    """Whether layers go to stages by what their ranks turn out to be capable of: where nothing else says it, and the
    ranks are not the same processor anyway."""
    one_processor = facts.device == "cpu" and facts.ranks_per_node == facts.world
    known = stage_speeds(plan.cluster, plan.grid) is not None
    return plan.grid.degree(Axis.PIPELINE) > 1 and recipe.pipeline.split == "auto" and not known and not one_processor


def _measured_speeds(plan: Plan, ranks: "Ranks") -> tuple[float, ...] | None:
    """Return the measured speeds of the stages' ranks, None where they are equal. Collective."""
    from llmtrain.model.dtypes import DTYPES
    from llmtrain.parallel.pipeline.speed import Work, measured_speeds

    rows = plan.batch.microbatch * plan.batch.sequence_length
    return measured_speeds(Work(rows, plan.model.hidden, plan.model.ffn, DTYPES[plan.compute]), ranks)


def _has_apex() -> bool:
    """Whether NVIDIA's apex is installed, not the package of the same name on PyPI."""
    from importlib.util import find_spec

    return find_spec("amp_C") is not None
