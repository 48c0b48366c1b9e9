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

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.topology import layout_degrees, stage_speeds
from llmtrain.comm.environment import Launched, heed_launcher, launched
from llmtrain.errors import (
    BadInputError,
)
from llmtrain.launch.ending import ending_as_one
from llmtrain.launch.gpus import check_gpus
from llmtrain.model.hf_config import read_hf_config
from llmtrain.plan.check import advice, memory_problem
from llmtrain.plan.prepare import check_and_resolve, folders_above
from llmtrain.plan.resolve import Facts, as_data, decisions, shape, to_yaml
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
    unled = _without_mpi(resolved, world) if place is None else None
    lacking = [sentence for sentence in (unled, memory_problem(resolved, facts)) if sentence]
    if dry_run:
        cluster = resolved.cluster if isinstance(resolved.cluster, Cluster) else None
        said = advice(resolved, cluster, Layout(layout_degrees(resolved.parallel, world)))
        said += lacking
        summary = summarize(recipe, resolved, world, "GPU" if gpus else "CPU")
        if as_json:
            say_json({"recipe": as_data(resolved), "summary": summary.as_data(), "advice": said})
            return
        # As comments: what is printed stays a recipe.
        say_long("".join((summary.comments(), to_yaml(resolved), *(f"# {sentence}\n" for sentence in said))))
        return
    check_gpus(gpus, place, world)
    with _told_once(place):
        if lacking:
            raise BadInputError(lacking[0])
    if place is not None or world == 1:
        _run_rank(recipe, resolved, place, facts)
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


def _without_mpi(recipe: Recipe, world: int) -> str | None:
    """Return what is missing where nobody has started the ranks of a pipeline whose messages MPI carries."""
    if recipe.parallel.pipeline == 1 or recipe.pipeline.transport != "mpi":
        return None
    return (
        f"pipeline.transport is mpi, but no MPI has started this run; start it with mpirun -n {world} llmtrain run "
        "RECIPE, or set pipeline.transport=torch"
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
        from llmtrain.launch.stop import heed_defaults
        from llmtrain.training.loop import train

    said = []
    if place is not None:
        os.environ.update(place.variables)
        die_with_launcher()
        said.append(f"{place.world} ranks, started by {place.by}")
    facts = replace(facts, cluster=resolved.cluster if isinstance(resolved.cluster, Cluster) else None)
    layout = Layout(layout_degrees(resolved.parallel, facts.world))
    timeout = timedelta(seconds=resolved.train.timeout)
    heed_defaults()
    with Waiting(
        lambda: f"waiting for all {facts.world} ranks to start" if facts.world > 1 else "starting",
        enabled=_speaks(place),
    ):
        ranks = connect(layout, facts.tiers, timeout, facts.cluster, noted=True)
    ranks = ranks if ranks.watchdog is not None else watched(ranks, timeout)
    with ending_as_one(ranks), Waiting(ranks.activity.doing, enabled=ranks.is_main) as waiting:
        if _is_split_by_speed(recipe, layout, facts):
            resolved, speeds = _split_by_speed(recipe, resolved, ranks, facts)
            said.append(speeds)
        train(resolved, ranks, [*said, *decisions(recipe, resolved), *advice(resolved, facts.cluster, layout)], waiting)
    disconnect(ranks)


def _is_split_by_speed(recipe: Recipe, layout: Layout, facts: Facts) -> bool:
    """Whether layers go to stages by what their ranks turn out to be capable of: where nothing else says it, and the
    ranks are not the same processor anyway."""
    one_processor = facts.device == "cpu" and facts.ranks_per_node == facts.world
    known = stage_speeds(facts.cluster, layout) is not None
    return layout.degree(Axis.PIPELINE) > 1 and recipe.pipeline.split == "auto" and not known and not one_processor


def _split_by_speed(recipe: Recipe, resolved: Recipe, ranks: "Ranks", facts: Facts) -> tuple[Recipe, str]:
    """Return the recipe resolved again with measured speeds, and what they are. Collective."""
    from llmtrain.parallel.pipeline.speed import Work, measured_speeds
    from llmtrain.training.build import DTYPES

    config = shape(resolved)
    rows = int(resolved.train.microbatch) * resolved.data.sequence_length
    speeds = measured_speeds(Work(rows, config.hidden, config.ffn, DTYPES[resolved.precision.compute]), ranks)
    if speeds is None:
        return resolved, "stages are equally fast, as measured"
    shown = ", ".join(f"{speed:.2f}" for speed in speeds)
    return check_and_resolve(
        recipe, replace(facts, speeds=speeds), read_hf_config
    ), f"speeds of the stages, as measured: {shown}"


def _has_apex() -> bool:
    """Whether NVIDIA's apex is installed, not the package of the same name on PyPI."""
    from importlib.util import find_spec

    return find_spec("amp_C") is not None
