"""The view of a plan as tables. No torch in here."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

from llmtrain_data import units
from llmtrain_data.output import table
from rich.table import Table

from llmtrain.model.tensors import parameter_count
from llmtrain.plan.cost.step_traffic import PURPOSES, RoleTraffic
from llmtrain.plan.cost.volume_traffic import Moved
from llmtrain.plan.memory.memory_budget import Budget, RoleMemory
from llmtrain.plan.per_rank.near_volumes import VolumeShare
from llmtrain.plan.per_rank.roles import Role
from llmtrain.plan.pipeline.actions import rank_live
from llmtrain.plan.plan import Plan
from llmtrain.plan.views.times_shown import (
    LANE_COLUMNS,
    hold_rows,
    lane_rows,
    least_rows,
    simulated_rows,
    unknown_rates,
    wire_rows,
)
from llmtrain.plan.views.view import PlanView, layers_of, most_offloaded

LABELS: Mapping[str, str] = MappingProxyType(
    {
        "weights": "weights",
        "gradients": "gradients (fp32 sums)",
        "optimizer": "optimizer states",
        "secondary": "secondary copy of the weights",
        "replicated": "TP-replicated parameters, unpacked",
        "gathered_weights": "gathered weights",
        "gradient_buffers": "gradients before their reduction",
        "in_flight": "buffers in flight",
        "checkpoint_copies": "copies of states for checkpoints",
        "checkpoint_buffers": "buffers of checkpoints",
        "activation_slots": "activations that come back",
        "activations": "activations",
        "host_states": "offloaded optimizer states",
        "host_weights": "offloaded weights",
        "host_gradients": "offloaded sums of gradients",
        "spare_states": "what is stepped before the norm is known",
        "offload_slots": "buckets of offloaded states",
        "weights_ahead": "weights of what is stepped before the norm is known",
        "offload_buffers": "buffers of offloaded states",
        "host_activations": "offloaded activations",
        "activation_buffers": "buffers of offloaded activations",
        "temporaries": "temporaries",
        "context": "context of the process",
        "process": "the process itself",
        "communicators": "communicators",
        "fragmentation": "fragmentation",
    }
)
"""Words for the purposes of a budget."""


def parts(view: PlanView) -> Iterator[Table | str]:
    """Yield tables and lines that show a view, in the order to print."""
    plan, fullest = view.plan, view.budget.fullest
    grid = " x ".join(f"{axis.value} {degree}" for axis, degree in plan.grid.degrees.items())
    ranks = units.count(plan.grid.world, "rank")
    devices = "CPUs" if plan.device == "cpu" else "GPUs"
    yield f"{plan.name}: {units.number(parameter_count(plan.model))} parameters on {ranks}, {grid}, on {devices}"
    yield ""
    yield table((f"memory of rank {fullest.role.rank}", "device", "share"), list(_breakdown(plan, view.budget)))
    offloaded = list(_offloaded(view.budget))
    if offloaded:
        yield ""
        yield table(("elsewhere", "bytes", "share"), offloaded)
    if any(one.socket is not None for one in view.volumes):
        yield ""
        yield table(("volume", "socket", "part of the files", "from other sockets"), list(_volumes(view.volumes)))
    if view.moved:
        yield ""
        yield table(("moved in a step", "volume", "read", "written"), list(_moved(view.moved)))
    if view.lane_times:
        yield ""
        yield table(LANE_COLUMNS, list(lane_rows(view.lane_times, view.step_threads)))
    groups = [list(same) for _, same in groupby(view.budget.rows, key=_sizes)]
    if len(groups) > 1:
        yield ""
        yield table(_COLUMNS, [_group(plan, rows, fullest) for rows in groups])
    if any(row.sent for row in view.traffic):
        yield ""
        yield table(*_traffic_table(view.traffic))
    yield ""
    yield table((), [*_times(view), *(("auto" if not index else "", line) for index, line in enumerate(view.auto))])
    yield from view.advice


def device_label(plan: Plan, name: str) -> str:
    """Return words for a purpose of a plan's memory."""
    return LABELS[name].replace("fp32 sums", f"{plan.gradients} sums")


def _breakdown(plan: Plan, budget: Budget) -> Iterator[tuple[str, str, str]]:
    fullest, limit = budget.fullest, budget.limit
    whole = limit or fullest.total
    for name, count in fullest.device.items():
        if count:
            label = _activations(plan, fullest.role) if name == "activations" else device_label(plan, name)
            yield label, units.size(count), f"{count / whole:.1%}"
    yield "total", units.size(fullest.total), f"{fullest.total / whole:.1%}"
    if limit is not None:
        left = limit - fullest.total
        yield "accelerator.memory", units.size(limit), "100.0%"
        yield ("left" if left >= 0 else "missing"), units.size(abs(left)), f"{abs(left) / whole:.1%}"


def _activations(plan: Plan, role: Role) -> str:
    """Return words for the activations of a role: of how many microbatches, and whether blocks are recomputed."""
    schedule, layouts = plan.pipeline.schedule, plan.stages_of(role.rank)
    if not schedule.message_driven:
        live = rank_live(schedule, role.pipeline)
    else:
        live = 1 if layouts[0].closes else min(plan.pipeline.limit, schedule.microbatches)
    chunk = " of a chunk" if len(layouts) > 1 else ""
    recomputed = ", recomputed" if any(layout.recompute for layout in layouts) else ""
    return f"activations ({live:,} microbatch{'' if live == 1 else 'es'}{chunk}{recomputed})"


def _offloaded(budget: Budget) -> Iterator[tuple[str, str, str]]:
    """Yield rows about the host's memory and files of the rank that takes most of them."""
    row = most_offloaded(budget)
    whole = budget.host_limit
    for name, count in row.host.items():
        # Nobody asks for the process alone where no limit is stated.
        if count and (whole or name != "process"):
            yield f"{LABELS[name]}, in the host's memory", units.size(count), f"{count / whole:.1%}" if whole else ""
    if whole and budget.host != sum(row.host.values()):
        yield "mean of a node's ranks", units.size(budget.host), f"{budget.host / whole:.1%}"
    if whole:
        yield "a rank's share of node.host.memory", units.size(whole), "100.0%"
    if row.files:
        yield "offloaded, in files", units.size(row.files), ""


def _volumes(shares: Sequence[VolumeShare]) -> Iterator[Sequence[object]]:
    for one in shares:
        yield one.path, "-" if one.socket is None else one.socket, f"{one.share:.1%}", f"{one.far:.1%}"


def _moved(moved: Mapping[str, Moved]) -> Iterator[tuple[str, str, str, str]]:
    for name, by_path in moved.items():
        for path, (read, written) in by_path.items():
            yield name, path, units.size(read), units.size(written)


_COLUMNS = ("ranks", "from rank", "pipeline", "layers", "parameters", "model states", "rest", "total", "")


def _sizes(row: RoleMemory) -> tuple[int, ...]:
    return row.role.parameters, row.role.ranks, *row.device.values()


def _group(plan: Plan, rows: Sequence[RoleMemory], fullest: RoleMemory) -> Sequence[object]:
    first, last = rows[0], rows[-1]
    states = first.model_states
    pipeline_ranks = sorted({first.role.pipeline, last.role.pipeline})
    return (
        f"{sum(row.role.ranks for row in rows):,}",
        first.role.rank,
        "-".join(map(str, pipeline_ranks)),
        layers_of(plan, first),
        units.number(first.role.parameters),
        units.size(states),
        units.size(first.total - states),
        units.size(first.total),
        "fullest" if first.total == fullest.total else "",
    )


def _traffic_table(traffic: Sequence[RoleTraffic]) -> tuple[tuple[str, ...], list[Sequence[object]]]:
    """Return the columns and rows of a table of traffic: a row for each tier of each group of ranks that send the
    same."""
    used = [name for name in PURPOSES if any(name in sent for row in traffic for sent in row.sent.values())]
    rows: list[Sequence[object]] = []
    for _, same in groupby(traffic, key=lambda row: row.sent):
        group = list(same)
        ranks, first = sum(row.role.ranks for row in group), group[0]
        for tier, sent in first.sent.items():
            sizes = (units.size(sent[name]) if name in sent else "-" for name in used)
            rows.append((f"{ranks:,}", first.role.rank, tier, *sizes, units.size(sum(sent.values()))))
    return ("sent by", "from rank", "over", *used, "total"), rows


def _times(view: PlanView) -> Iterator[tuple[str, str]]:
    batch = view.plan.batch
    yield (
        "step",
        f"{batch.sequences} sequences of {batch.sequence_length} tokens, in {batch.microbatches} "
        f"microbatch{'' if batch.microbatches == 1 else 'es'} of {batch.microbatch} on each replica",
    )
    most = max(view.budget.rows, key=lambda row: row.activations_moved)
    if most.activations_moved:
        moved = units.size(most.activations_moved)
        yield "offload", f"{moved} of activations leave rank {most.role.rank} in a step, and come back"
    yield from least_rows(view.least, view.plan, host=not view.lane_times)
    yield from wire_rows(view.wires)
    yield from simulated_rows(view.simulated, view.lane_times)
    yield from hold_rows(view.save)
    for sentence in unknown_rates(view.plan, view.lane_times, view.simulated):
        yield "rates", sentence
