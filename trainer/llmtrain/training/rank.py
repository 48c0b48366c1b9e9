"""One rank of a run: it connects to the others, measures the stages' speeds if the plan needs them, and trains."""

import os
from dataclasses import replace
from datetime import timedelta

import torch
from llmtrain_data import units
from llmtrain_data.waiting import Waiting

from llmtrain.cluster.control_groups import usable_cores
from llmtrain.comm.cores import Bound, bind_to_socket
from llmtrain.comm.device import gpus, take_deterministic_kernels
from llmtrain.comm.environment import Launched
from llmtrain.comm.ranks import Ranks, connect, disconnect, with_watchdog
from llmtrain.comm.threads import THREADS, even_cores, set_by_user
from llmtrain.launch.ending import end_together
from llmtrain.launch.local import die_with_launcher
from llmtrain.launch.stop import restore_handlers
from llmtrain.plan.cost.least_time import step_threads
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import memory_budget
from llmtrain.plan.plan import Plan
from llmtrain.training.attention import quickest, take_planned
from llmtrain.training.compilation import compiles
from llmtrain.training.loop import train
from llmtrain.training.open_choices import OpenChoices
from llmtrain.training.same_plan import check_same_plan
from llmtrain.training.stage_speeds import measure, splits_by_speed


def run_rank(open_choices: OpenChoices, plan: Plan, facts: Facts, launch: Launched | None) -> None:
    """Train as one rank of the run. launch: how this rank was launched, None for the only rank."""
    said = []
    if launch is not None:
        os.environ.update(launch.variables)
        die_with_launcher()
        said.append(f"{launch.world} ranks, started by {launch.by}")
    restore_handlers()
    bound = _bound(launch)
    if plan.training.deterministic:
        take_deterministic_kernels()
    ranks = _connected(plan, launch)
    with end_together(ranks), Waiting(ranks.activity.doing, enabled=ranks.is_main) as waiting:
        check_same_plan(plan, ranks)
        share = even_cores(ranks.gather_all)
        threads = _take_threads(plan, share, bound)
        said += _few_threads(plan, share, threads)
        if bound is not None:
            said.append(f"rank 0 runs on socket {bound.socket}, with {units.count(threads, 'thread')}")
        plan, measured = as_measured(open_choices, plan, facts, ranks)
        take_planned(plan)
        train(plan, ranks, [*said, *measured, *open_choices.remarks(plan)], waiting)
    disconnect(ranks)


def as_measured(open_choices: OpenChoices, plan: Plan, facts: Facts, ranks: Ranks) -> tuple[Plan, list[str]]:
    """Return the plan for what the ranks measure, and sentences about it. Collective."""
    said = list[str]()
    for measuring in (_with_speeds, _with_attention, _with_compilation):
        found, sentences = measuring(open_choices, plan, facts, ranks)
        said += sentences
        if found != facts:
            facts, plan = found, open_choices.replan(found)
    return plan, said


def _with_speeds(open_choices: OpenChoices, plan: Plan, facts: Facts, ranks: Ranks) -> tuple[Facts, list[str]]:
    if not (open_choices.split and splits_by_speed(plan, facts)):
        return facts, []
    speeds, sentence = measure(plan, ranks)
    found = replace(facts, speeds=speeds)
    # The start has checked an even split. A faster stage may have no room for the layers that it gets.
    if speeds and memory_budget(open_choices.replan(found)).exceeds and not memory_budget(plan).exceeds:
        return facts, [
            sentence,
            "the layers stay as they were split, as a split by these speeds does not fit the memory",
        ]
    return found, [sentence]


def _with_attention(open_choices: OpenChoices, plan: Plan, facts: Facts, ranks: Ranks) -> tuple[Facts, list[str]]:
    if not open_choices.attention or facts.device == "cpu":
        return facts, []
    kernel, sentences = quickest(plan, ranks)
    return replace(facts, attention=kernel), sentences


def _with_compilation(open_choices: OpenChoices, plan: Plan, facts: Facts, ranks: Ranks) -> tuple[Facts, list[str]]:
    if not open_choices.compile or facts.device == "cpu":
        return facts, []
    take_planned(plan)
    compiled, sentences = compiles(plan, ranks)
    return replace(facts, compiled=compiled), sentences


def _bound(launch: Launched | None) -> Bound | None:
    """Bind this rank to the processor of its GPU; return None if it is not bound. Call it before anything is
    allocated."""
    # A launcher that does not number the ranks of a machine calls all of them the first one.
    if launch is not None and not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        return None
    here = (0, 1) if launch is None else (launch.local_rank, launch.ranks_per_node)
    try:
        addresses = [gpu.address for gpu in gpus()]
    except RuntimeError:
        # It may be another rank's GPU, which is to be left out then. This rank's own fails as the ranks connect.
        return None
    return bind_to_socket(here, addresses)


def _take_threads(plan: Plan, share: int, bound: Bound | None) -> int:
    """Set this rank's threads on the host, which step offloaded states, and return their number. share: number of cores
    that it has for itself."""
    before = torch.get_num_threads()
    if plan.device == "cpu":
        # torch takes all cores, also where a quota lets it use fewer at once.
        most = before if set_by_user() else usable_cores()
        threads = min(before, most, before if bound is None else bound.threads)
    else:
        threads = _host_threads(plan, share, before)
    if threads != before:
        torch.set_num_threads(threads)
    return threads


def _host_threads(plan: Plan, share: int, default: int) -> int:
    """Return the threads on the host of a rank of a GPU. share: number of cores that it has for itself. default:
    torch's number."""
    if set_by_user():
        return default
    stated = step_threads(plan)
    if stated is not None:
        return min(stated, share)
    # A launcher's default says nothing about this machine. Without one, torch takes its physical cores.
    return share if THREADS in os.environ else min(share, default)


def _few_threads(plan: Plan, share: int, threads: int) -> list[str]:
    """Return a sentence if the user's number of threads, which stays, is at most half of what steps offloaded states
    without it, else none. Profiles of sites and images set 1."""
    offload = plan.sharding.offload
    if plan.device == "cpu" or not offload.share or offload.on_device or not set_by_user():
        return []
    could = min(share, step_threads(plan) or share)
    if 2 * threads > could:
        return []
    return [
        f"{THREADS} is {threads}, and a rank could step offloaded states with {units.count(could, 'thread')}; unset it "
        "where your profile, job script or image sets it"
    ]


def _connected(plan: Plan, launch: Launched | None) -> Ranks:
    """Connect to the other ranks. Collective."""
    world, timeout = plan.grid.world, timedelta(seconds=plan.training.timeout)
    doing = f"waiting for all {world} ranks to start" if world > 1 else "starting"
    with Waiting(lambda: doing, enabled=launch is None or launch.is_first):
        ranks = connect(plan.grid, plan.tiers, timeout, plan.cluster, noted=True)
    return ranks if ranks.watchdog is not None else with_watchdog(ranks, timeout)
