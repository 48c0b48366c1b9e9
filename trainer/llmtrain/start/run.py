"""`llmtrain run`: load the recipe, check and plan it; then print the plan, launch ranks, or train as one of them."""

import json
import os
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from llmtrain_data.files import allow_many_files
from llmtrain_data.output import say
from llmtrain_data.waiting import loading
from llmtrain_kernels.attention.choice import PACKAGES, is_installed

from llmtrain.checkpoint.folder import check_origin, check_start, step_folders, step_of
from llmtrain.cluster.layout import Axis
from llmtrain.cluster.load import given_cluster
from llmtrain.comm.environment import Launched, heed_launcher, idle_nodes, launched
from llmtrain.errors import BadInputError, RunFailedError
from llmtrain.launch.ending import reported_once
from llmtrain.launch.gpus import (
    check_gpus,
    cluster_of_gpus,
    few_queues,
    fixed_segments,
    gpu_memory_problem,
    idle_gpus,
    least_capability,
    memory_held_by_others,
    set_gpu_variables,
    triton_problem,
    unseen_gpus,
)
from llmtrain.launch.run_lock import locked_by, taken_by
from llmtrain.launch.waiting import set_waiting
from llmtrain.plan.checkpointing import checkpointing
from llmtrain.plan.facts import Facts
from llmtrain.plan.plan import Plan
from llmtrain.plan.record import decisions
from llmtrain.plan.resolve.check import advice
from llmtrain.plan.resolve.machine_refusal import machine_refusal
from llmtrain.plan.resolve.offload_check import offload_kernels, offload_problem, offload_remarks
from llmtrain.plan.resolve.prepare import check_and_plan, check_recipe, folders_above, named_facts
from llmtrain.plan.resolve.refusal import refusal
from llmtrain.plan.views.summary import summarize
from llmtrain.recipe.load import as_data, load_recipe, parse_recipe
from llmtrain.recipe.schema import Recipe
from llmtrain.start.dry_run import print_plan, resumption
from llmtrain.training.open_choices import OpenChoices

# The least compute capability of NVIDIA's GPUs that compute in bf16.
BF16 = (8, 0)
# Holds the recipe for the ranks that this process starts.
RECIPE = "LLMTRAIN_RECIPE"
# torchrun's --max-restarts, for its ranks.
_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
# Bytes of an environment variable; Linux takes 128 KiB with its name.
LONGEST_VARIABLE = 120_000


def start(
    name: str, overrides: list[str], nproc: int | None, dry_run: bool, as_json: bool = False, force: bool = False
) -> None:
    """Check a recipe and run it: in this process, on ranks of this machine that are started here, or, where a launcher
    started this process, as one of its ranks. dry_run: only print the plan; as_json: as JSON. force: also run what
    does not fit the memory that the cluster file states, or on CPUs that of this machine."""
    if as_json and not dry_run:
        raise BadInputError("--json is given without --dry-run; add it, or leave --json out and read metrics.jsonl")
    heed_launcher()
    # The first rank has several sockets for each of the others.
    allow_many_files()
    launch = launched(os.environ, nproc)
    with reported_once(launch):
        given = _given_recipe(launch)
        recipe = given or load_recipe(name, overrides)
        check_recipe(recipe, () if given else folders_above(name))
        check_start(checkpointing(recipe.checkpoint), Path(recipe.logging.dir, recipe.name, "checkpoints"))
        _check_restarts(recipe, launch)
    if launch is None and not dry_run:
        _refuse_second(Path(recipe.logging.dir, recipe.name))
    # PyTorch, which knows whether there are GPUs, must not be loaded yet. With GPUs it does no harm.
    waiting = None if dry_run or launch is not None else set_waiting(os.environ, nproc or 1)
    gpus = _gpus(launch)
    facts = _facts(launch, nproc, gpus, described=recipe.cluster != "auto")
    with reported_once(launch):
        plan = check_and_plan(recipe, facts)
        # Ranks that a launcher has started compare when they load: a manifest may have hundreds of MB.
        differences = check_origin(plan) if launch is None else []
    named = named_facts(recipe, facts)
    too_large = None if force else refusal(recipe, named, plan)
    too_much = None if force else machine_refusal(recipe, named, plan)
    too_small = gpu_memory_problem(given_cluster(recipe.cluster)) if gpus and not force else None
    volumes = offload_problem(plan, facts.node_ranks)
    mine = _machine_problems(plan, launch, facts, force)
    problems = [*mine, *(problem for problem in (too_small, too_large, too_much, volumes) if problem)]
    if dry_run:
        summary = summarize(recipe, plan, "GPU" if gpus else "CPU")
        begun, untimed = resumption(recipe, plan), _untimed(recipe, plan)
        remarks = [*differences, *begun, *advice(recipe, plan), *untimed, *offload_remarks(plan), *problems]
        print_plan(plan, summary, remarks, as_json)
        return
    check_gpus(gpus, launch, facts.world)
    for remark in _remarks(launch, gpus):
        say(f"llmtrain: {remark}", err=True)
    set_gpu_variables(facts.world, plan.training.deterministic)
    with reported_once(launch):
        if problems:
            raise BadInputError(problems[0])
    if waiting is not None and facts.device == "cpu":
        say(f"llmtrain: {waiting}", err=True)
    if launch is not None or facts.world == 1:
        with loading("the trainer", launch is None or launch.is_first):
            from llmtrain.training.rank import run_rank

        run_rank(open_choices(recipe), plan, facts, launch)
    else:
        words = ["run", name, *overrides, *(["--force"] if force else [])]
        _launch(words, recipe, facts, force)


def _given_recipe(launch: Launched | None) -> Recipe | None:
    """Return the recipe that `llmtrain run` has given to this rank, which it has started; None if there is none."""
    text = os.environ.get(RECIPE) if launch is not None and launch.by == "llmtrain" else None
    return None if text is None else parse_recipe(json.loads(text))


def _check_restarts(recipe: Recipe, launch: Launched | None) -> None:
    """Raise BadInputError where a launcher would restart ranks that may not resume. `llmtrain run` knows which folder
    was empty at its start; torchrun does not."""
    if launch is not None and recipe.checkpoint.resume == "never" and os.environ.get(_RESTARTS, "0") != "0":
        raise BadInputError(
            f"checkpoint.resume is never, but {launch.by} restarts lost ranks (--max-restarts), which resume from "
            "checkpoints; leave checkpoint.resume out"
        )


def open_choices(recipe: Recipe) -> OpenChoices:
    """Return what a recipe leaves open until its ranks have measured."""
    return OpenChoices(
        attention=recipe.train.attention == "auto",
        compile=recipe.train.compile == "auto",
        split=recipe.pipeline.split == "auto",
        replan=lambda facts: check_and_plan(recipe, facts),
        remarks=lambda plan: [*decisions(recipe, plan.record), *advice(recipe, plan), *offload_remarks(plan)],
    )


def _remarks(launch: Launched | None, gpus: int) -> list[str]:
    """Return sentences about nodes and GPUs that the run leaves idle, about memory that others hold, and about what the
    environment slows down. gpus: of this machine."""
    if launch is not None and not launch.is_first:
        return []
    idle = idle_nodes(os.environ) if launch is None else idle_gpus(gpus, launch)
    # Our launcher has said it.
    said = gpus and (launch is None or launch.by != "llmtrain")
    slow = [few_queues(os.environ), fixed_segments(os.environ)] if said else []
    crowded = memory_held_by_others() if gpus and launch is None else None
    return [sentence for sentence in (idle, *slow, crowded) if sentence]


def _refuse_second(folder: Path) -> None:
    """Report a run that trains in the folder before PyTorch is loaded. Taking the lock later finds the other cases."""
    if (holder := locked_by(folder)) is not None:
        raise RunFailedError(taken_by(folder, holder))


def _gpus(launch: Launched | None) -> int:
    """Return how many GPUs this process sees."""
    # torch is imported this late so that a mistake in the recipe's text or paths is reported immediately.
    with loading("PyTorch", launch is None or launch.is_first):
        from llmtrain.comm.device import gpu_count
    return gpu_count()


def _native() -> bool:
    """Return whether the C++ kernels for CPUs run here. Builds them if needed."""
    from llmtrain_kernels.native import native_available

    return native_available()


def _facts(launch: Launched | None, nproc: int | None, gpus: int, described: bool) -> Facts:
    """Return the facts of a run. described: whether the recipe describes the cluster."""
    from llmtrain.comm.device import built_for_amd

    world = launch.world if launch else nproc or max(1, gpus)
    here = launch.ranks_per_node if launch else world
    return Facts(
        world=world,
        ranks_per_node=here,
        device="cuda" if gpus else "cpu",
        # NVIDIA's apex, not the package of the same name on PyPI.
        apex=find_spec("amp_C") is not None,
        native=gpus > 0 or _native(),
        triton=find_spec("triton") is not None,
        bf16=not gpus or (least_capability() or BF16) >= BF16,
        amd=built_for_amd(),
        # Ranks on several machines would have to agree on one.
        machine=cluster_of_gpus(world) if gpus and here == world and not described else None,
    )


def _machine_problems(plan: Plan, launch: Launched | None, facts: Facts, force: bool) -> list[str]:
    """Return an error for each part of the software of this machine that the plan needs and that is not there."""
    triton = triton_problem() if facts.device == "cuda" and facts.triton and not force else None
    found = (
        _mpi_problem(plan, launch),
        _attention_problem(plan, facts),
        _kernels_problem(plan),
        triton and f"{triton} (--force takes it as it is)",
        unseen_gpus(os.environ) if facts.device == "cpu" and not force else None,
    )
    return [problem for problem in found if problem]


def _mpi_problem(plan: Plan, launch: Launched | None) -> str | None:
    """Return an error if MPI carries the messages between stages, but has not started this run; else None."""
    if launch is not None or plan.pipeline.schedule.ranks == 1 or plan.pipeline.transport != "mpi":
        return None
    return (
        "pipeline.transport is mpi, but no MPI has started this run; start it with mpirun -n "
        f"{plan.grid.world} llmtrain run RECIPE, or set pipeline.transport=torch"
    )


def _attention_problem(plan: Plan, facts: Facts) -> str | None:
    """Return an error if this machine does not have the kernel of attention, else None."""
    kernel = plan.training.attention
    if facts.device == "cuda" and facts.amd and kernel in ("cudnn", "flash-attn-3"):
        return f"train.attention is {kernel}, which needs a GPU of NVIDIA's; set it to auto"
    if facts.device == "cpu" or is_installed(kernel):
        return None
    return f"train.attention is {kernel}, and this Python has no package {PACKAGES[kernel]}; install it, or set auto"


def _untimed(recipe: Recipe, plan: Plan) -> list[str]:
    """Return sentences where a run would time kernels, which a dry run does not."""
    train, said = recipe.train, list[str]()
    if plan.device == "cpu":
        return said
    if train.attention == "auto" and plan.compute != "fp32":
        said.append("train.attention is auto: the run times kernels of attention at its start; this plan has torch's")
    alone = plan.grid.degree(Axis.TENSOR) == plan.grid.degree(Axis.PIPELINE) == 1
    if train.compile == "auto" and alone and not train.deterministic:
        said.append("train.compile is auto: the run times a block at its start; this plan has none compiled")
    return said


def _kernels_problem(plan: Plan) -> str | None:
    """Return an error if C++ kernels that offloaded states need do not run on this machine, or find no interface to
    files, else None. Builds them if needed."""
    kernels = offload_kernels(plan)
    if not kernels:
        return None
    from llmtrain_kernels.native import native_reason

    if reason := native_reason(kernels):
        return f"offload needs C++ kernels, and this machine cannot have them ({reason}); or leave offload out"
    if "direct_io" not in kernels:
        return None
    from llmtrain_kernels.direct_io.queue import DirectQueue

    try:
        DirectQueue().close()
    except OSError as error:
        return (
            f"offload to files needs io_uring or Linux AIO, and this machine has neither ({error.strerror}); allow one "
            "(in a container its seccomp profile; sysctl kernel.io_uring_disabled, fs.aio-max-nr), or leave nvme out"
        )
    return None


def _launch(words: list[str], recipe: Recipe, facts: Facts, force: bool) -> None:
    """Start the ranks on this machine with these arguments, and restart them as the recipe says when one is lost.

    force: see `start`.
    """
    from llmtrain.launch.local import Restarts, launch

    folder = Path(recipe.logging.dir, recipe.name, "checkpoints")
    # Ranks that start again take the recipe as it was, whatever its file has become. They resume also where the run
    # was to begin without checkpoints: by now those in its folder are its own.
    again = replace(recipe.checkpoint, resume="auto") if recipe.checkpoint.resume == "never" else recipe.checkpoint
    text = json.dumps(as_data(replace(recipe, checkpoint=again)))
    if len(text) <= LONGEST_VARIABLE:
        os.environ[RECIPE] = text

    def newest() -> int | None:
        found = step_folders(folder)
        return step_of(found[-1]) if found else None

    def fewer(ranks: int) -> int:
        for world in range(ranks - 1, 0, -1):
            with suppress(BadInputError):
                left = named_facts(recipe, replace(facts, world=world, ranks_per_node=world))
                plan = check_and_plan(recipe, left)
                if force or (refusal(recipe, left, plan) or machine_refusal(recipe, left, plan)) is None:
                    return world
        return ranks

    launch(facts.world, words, Restarts(recipe.train.max_restarts, newest, fewer))
