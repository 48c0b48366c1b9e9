"""The times of a step, as rows of tables and sentences. No torch in here."""

import shlex
from collections.abc import Iterator, Sequence

from llmtrain_data import units

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.load import shipped_clusters
from llmtrain.cluster.tiers import axis_tiers, tier_ranks
from llmtrain.plan.cost.lane_times import CPU, DEVICE, LaneTime, volume_paths
from llmtrain.plan.cost.least_time import LeastTime, compute_peak
from llmtrain.plan.cost.save_hold import SaveHold
from llmtrain.plan.cost.simulated_step import SimulatedStep
from llmtrain.plan.cost.wire_times import WireTime
from llmtrain.plan.flops import lack_of_bf16
from llmtrain.plan.plan import Plan

LANE_COLUMNS = ("lane of a step", "way", "ranks", "bytes", "rate", "least time")


def lane_rows(found: Sequence[LaneTime], threads: int | None) -> Iterator[Sequence[object]]:
    """Yield the rows of a table of lanes. threads: with which each rank steps offloaded states on the CPU, if that is
    known."""
    for lane in found:
        stepping = lane.name == CPU and threads is not None
        name = f"{lane.name}, {units.count(threads or 0, 'thread')} a rank" if stepping else lane.name
        rate = "not known" if lane.rate is None else units.rate(lane.rate)
        seconds = "-" if lane.seconds is None else units.seconds(lane.seconds)
        yield name, lane.way, lane.ranks, units.size(lane.nbytes), rate, seconds


def least_rows(least: LeastTime, plan: Plan, host: bool) -> Iterator[tuple[str, str]]:
    """Yield (name, words) for each lower bound of a step's time. host: with that of a step by the host's processors."""
    accelerator = plan.cluster.accelerator if plan.cluster else None
    if least.compute is None and accelerator is not None:
        lack = lack_of_bf16(plan.compute, accelerator)
        missing = f"give cluster.accelerator.name or cluster.accelerator.peak.{plan.compute}"
        yield "compute", f"unknown: {missing if lack is None else f'{lack}; set precision.compute=fp16'}"
    known = (
        ("compute", least.compute, "at the accelerator's peak"),
        ("optimizer", least.optimizer, "at the bandwidth of the accelerator's memory"),
        ("optimizer on the host", least.host if host else None, "at the bandwidth of the host's memory"),
    )
    for name, value, why in known:
        if value is not None:
            yield name, f"at least {units.seconds(value)}, {why}"


def wire_rows(wires: Sequence[WireTime]) -> Iterator[tuple[str, str]]:
    """Yield (name, words) for the least time of each tier's links."""
    for one in wires:
        sender = f"rank {one.rank} sends" if one.per == "rank" else f"the node of rank {one.rank} sends"
        yield (
            f"wire of {one.tier}",
            f"at least {units.seconds(one.seconds)} on the wire, for {units.size(one.nbytes)} that {sender} at "
            f"{units.rate(one.rate)}",
        )


def slow_links(plan: Plan, wires: Sequence[WireTime], least: LeastTime) -> Iterator[str]:
    """Yield a sentence about links between nodes that take longer than the computation, as gradients cross them for
    each of several microbatches."""
    slow = [one for one in wires if one.per == "node" and least.compute is not None and one.seconds > least.compute]
    microbatches = plan.batch.microbatches
    if not slow or microbatches == 1 or plan.pipeline.name == "breadth-first":
        return
    inside = tier_ranks(axis_tiers(plan.tiers, plan.grid, Axis.DATA), "node")
    degrees = next(iter(plan.sharding.placements.values())).degrees
    # Gradients are sharded at least as far as weights.
    states = [name for name in ("weights", "gradients") if getattr(degrees, name) > inside]
    if states:
        parts = " ".join(f"zero.partition.{name}=node" for name in states)
        yield (
            f"the links of tier {slow[0].tier} take longer than the computation, as gradients cross them for each of "
            f"the {microbatches} microbatches of a step; {parts}, which takes more memory, or a larger "
            "train.microbatch with activation_checkpointing=full sends less"
        )


def simulated_rows(simulated: SimulatedStep | None, found: Sequence[LaneTime]) -> Iterator[tuple[str, str]]:
    """Yield (name, words) for a simulated step, or why it was not simulated."""
    if simulated is None:
        return
    if simulated.also_moved is not None:
        known = [lane.seconds for lane in found if lane.seconds is not None]
        least = f"; no step is shorter than its busiest lane, {units.seconds(max(known))}" if known else ""
        yield "step, simulated", f"not known, as {simulated.also_moved} move too{least}"
    elif simulated.moves is None:
        yield "step, simulated", "not known without all rates"
    elif simulated.with_compute is None:
        yield "step, simulated", f"{units.seconds(simulated.moves)} on rank {simulated.rank}, without the computation"
    else:
        yield (
            "step, simulated",
            f"{units.seconds(simulated.with_compute)} on rank {simulated.rank} with the computation at the "
            f"accelerator's peak, {units.seconds(simulated.moves)} without",
        )


def hold_rows(save: SaveHold | None) -> Iterator[tuple[str, str]]:
    """Yield (name, words) for how long a checkpoint holds up the run."""
    if save is None:
        return
    what = f"{units.size(save.taken)} of states of {units.count(save.ranks, 'rank')}"
    seconds = None if save.seconds is None else units.seconds(save.seconds)
    if not save.waits:
        # A copy that takes an unknown time needs no line.
        if seconds is not None:
            yield "checkpoint", f"{what} are copied, which holds up the run for at least {seconds}"
        return
    waits = f"the next optimizer step waits until {what} are read"
    if seconds is None:
        yield "checkpoint", f"{waits}; how long is not known without all rates"
    elif save.held is None:
        yield "checkpoint", f"{waits}, which takes at least {seconds}, beside its passes"
    else:
        beside = f", beside {units.seconds(save.passes)} of its passes" if save.passes else ""
        yield "checkpoint", f"{waits}, which takes at least {seconds}{beside}: held up for {units.seconds(save.held)}"


def unknown_rates(plan: Plan, found: Sequence[LaneTime], simulated: SimulatedStep | None) -> list[str]:
    """Return a sentence about the rates that a command measures, and one about those that a datasheet has. found:
    lanes, of which some rates are not known."""
    unknown, paths = [lane for lane in found if lane.rate is None], volume_paths(plan)
    measured = list(dict.fromkeys(lane.name for lane in unknown if lane.name != DEVICE))
    stated = dict.fromkeys(lane.key for lane in unknown if lane.name == DEVICE)
    accelerator = plan.cluster.accelerator if plan.cluster else None
    if simulated is not None and accelerator is not None and compute_peak(plan, accelerator) is None:
        # No datasheet has a peak in a dtype in which the card does not compute.
        stated |= {} if lack_of_bf16(plan.compute, accelerator) else {f"accelerator.peak.{plan.compute}": None}
    sentences = list[str]()
    if measured:
        folders = "".join(f"--paths {shlex.quote(path)} " for path in paths)
        names = ", ".join(measured)
        # The command keeps what the description of the cluster has besides the rates.
        cluster = plan.cluster.name if plan.cluster and plan.cluster.name in shipped_clusters() else None
        start = f"--cluster {cluster} " if cluster else ""
        more = ", with --cluster and your cluster file," if plan.cluster and not cluster else ""
        command = f"llmtrain bench memory {start}{folders}--output FILE"
        sentences.append(f"not known of {names}; `{command}`{more} measures them, and cluster=FILE states them")
    if stated:
        sentences.append(f"{' and '.join(stated)} of the cluster file is not stated; take it from the datasheet")
    return sentences
