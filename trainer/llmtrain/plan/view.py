"""What a run will take before it starts, as plain data and as tables. No torch in here."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any

from llmtrain_data import units
from llmtrain_data.output import table
from rich.table import Table

from llmtrain.model.tensors import parameter_count
from llmtrain.plan.budget import Budget, RoleMemory, memory_budget
from llmtrain.plan.check import advice, check
from llmtrain.plan.described import assumed, described_run
from llmtrain.plan.facts import Device
from llmtrain.plan.lanes import CPU, Lane, lanes
from llmtrain.plan.least_time import LeastTime, least_time, step_threads
from llmtrain.plan.make import make_plan
from llmtrain.plan.near_volumes import VolumeShare, volume_shares
from llmtrain.plan.plan import Plan
from llmtrain.plan.played_step import PlayedStep, played_step, rank_computation
from llmtrain.plan.program.by_rank import programs_of
from llmtrain.plan.record import decisions
from llmtrain.plan.refusal import refusal
from llmtrain.plan.save_hold import SaveHold, save_hold
from llmtrain.plan.step_traffic import PURPOSES, RoleTraffic, step_traffic
from llmtrain.plan.times_shown import LANE_COLUMNS, hold_rows, lane_rows, least_rows, played_rows, unknown_rates
from llmtrain.plan.volume_traffic import Moved, moved_of

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
        "offload_buffers": "buffers of offloaded states",
        "host_activations": "offloaded activations",
        "activation_buffers": "buffers of offloaded activations",
        "temporaries": "temporaries",
        "context": "context of the process",
        "communicators": "communicators",
        "fragmentation": "fragmentation",
    }
)
"""Words for the purposes of a budget."""

STATES = ("weights", "gradients", "optimizer", "secondary", "replicated")


@dataclass(frozen=True, kw_only=True)
class PlanView:
    """A plan and what it takes. problem: why it does not fit the stated memory, None if it does. auto: one line for
    each decision. advice: sentences on settings that are likely mistakes. moved: bytes that the rank with most files
    reads from and writes to volumes in a step. lanes: what moves what leaves the device. played: the step of that rank,
    None if no optimizer states leave. save: how long a checkpoint holds it up."""

    plan: Plan
    device: Device
    budget: Budget
    traffic: Sequence[RoleTraffic]
    moved: Mapping[str, Moved]
    lanes: Sequence[Lane]
    played: PlayedStep | None
    save: SaveHold | None
    least: LeastTime
    problem: str | None
    auto: Sequence[str]
    advice: Sequence[str]

    @property
    def step_threads(self) -> int | None:
        """The threads with which each rank steps offloaded states; None where torch decides."""
        return None if self.device == "cpu" else step_threads(self.plan)

    @property
    def volumes(self) -> Sequence[VolumeShare]:
        """What the NVMe volumes of a node get."""
        return volume_shares(self.plan)

    def as_data(self) -> dict[str, Any]:
        """Return the view as plain data, for JSON; bytes, seconds."""
        plan, budget = self.plan, self.budget
        accelerator = plan.cluster.accelerator if plan.cluster else None
        return {
            "name": plan.name,
            "parameters": parameter_count(plan.model),
            "ranks": plan.grid.world,
            "grid": {axis.value: degree for axis, degree in plan.grid.degrees.items()},
            "device": self.device,
            "accelerator": accelerator.name if accelerator else None,
            "batch": asdict(plan.batch),
            "memory": {
                "limit": budget.limit,
                "excess": budget.excess,
                "host_limit": budget.host_limit,
                "host_excess": budget.host_excess,
                "fullest": budget.fullest.role.rank,
                "roles": [_role(plan, row) for row in budget.rows],
            },
            "sent": [_traffic(row) for row in self.traffic],
            "moved": {"rank": most_outside(budget).role.rank, "volumes": self.moved},
            "lanes": [one.as_data() for one in self.lanes],
            "played": None if self.played is None else asdict(self.played),
            "save": None if self.save is None else {**asdict(self.save), "held": self.save.held},
            "unknown_rates": unknown_rates(plan, self.lanes, self.played),
            "least_seconds": asdict(self.least),
            "step_threads": self.step_threads,
            "volumes": [asdict(one) for one in self.volumes],
            "problem": self.problem,
            "advice": list(self.advice),
            "auto": list(self.auto),
        }


def view_recipe(name_or_path: str, overrides: Sequence[str], ranks: int | None) -> PlanView:
    """Return the view of a recipe's plan on a described cluster. ranks: see `described_run`. Raises BadInputError."""
    # A large plan makes millions of objects, none of them in a cycle; looking for cycles takes a quarter of its time.
    with _without_collection():
        return _view(name_or_path, overrides, ranks)


@contextmanager
def _without_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _view(name_or_path: str, overrides: Sequence[str], ranks: int | None) -> PlanView:
    recipe, facts = described_run(name_or_path, overrides, ranks)
    plan = make_plan(recipe, facts)
    check(plan, facts)
    programs = programs_of(plan)
    budget, moved = memory_budget(plan, facts.device, programs), moved_of(plan, programs)
    found, role = lanes(plan, facts.device, programs, moved), most_outside(budget).role
    played, computation = played_step(plan, role.rank, facts.device, found), rank_computation(plan, role.rank)
    return PlanView(
        plan=plan,
        device=facts.device,
        budget=budget,
        traffic=step_traffic(plan, facts.device, programs),
        moved=moved(role.rank),
        lanes=found if played is not None or any(lane.name != CPU for lane in found) else (),
        played=played,
        save=save_hold(plan, role, facts.device, None if computation is None else computation.seconds),
        least=least_time(plan, found),
        problem=refusal(recipe, facts, plan, budget),
        auto=decisions(recipe, plan.record),
        advice=[*assumed(recipe, facts, plan), *advice(plan)],
    )


def parts(view: PlanView) -> Iterator[Table | str]:
    """Yield tables and lines that show a view, in the order to print."""
    plan, fullest = view.plan, view.budget.fullest
    grid = " x ".join(f"{axis.value} {degree}" for axis, degree in plan.grid.degrees.items())
    ranks = units.count(plan.grid.world, "rank")
    devices = "CPUs" if view.device == "cpu" else "GPUs"
    yield f"{plan.name}: {units.number(parameter_count(plan.model))} parameters on {ranks}, {grid}, on {devices}"
    yield ""
    yield table((f"memory of rank {fullest.role.rank}", "device", "share"), list(_breakdown(plan, view.budget)))
    outside = list(_outside(view.budget))
    if outside:
        yield ""
        yield table(("elsewhere", "bytes", "share"), outside)
    if any(one.socket is not None for one in volume_shares(plan)):
        yield ""
        yield table(
            ("volume", "socket", "part of the files", "from other sockets"), list(_volumes(volume_shares(plan)))
        )
    if view.moved:
        yield ""
        yield table(("moved in a step", "volume", "read", "written"), list(_moved(view.moved)))
    if view.lanes:
        yield ""
        yield table(LANE_COLUMNS, list(lane_rows(view.lanes, view.step_threads)))
    groups = [list(alike) for _, alike in groupby(view.budget.rows, key=_sizes)]
    if len(groups) > 1:
        yield ""
        yield table(_COLUMNS, [_group(plan, alike, fullest) for alike in groups])
    if any(row.sent for row in view.traffic):
        yield ""
        yield table(*_traffic_table(view.traffic))
    yield ""
    yield table((), [*_times(view), *(("auto" if not place else "", line) for place, line in enumerate(view.auto))])
    yield from view.advice


def _role(plan: Plan, row: RoleMemory) -> dict[str, Any]:
    role = row.role
    return {
        "rank": role.rank,
        "ranks": role.ranks,
        "pipeline": role.pipeline,
        "layers": _layers(plan, row),
        "parameters": role.parameters,
        "device": dict(row.device),
        "total": row.total,
        "host": dict(row.host),
        "files": row.files,
        "activations_moved": row.activations_moved,
    }


def _traffic(row: RoleTraffic) -> dict[str, Any]:
    role = row.role
    return {"rank": role.rank, "ranks": role.ranks, "pipeline": role.pipeline, "tiers": row.sent}


def _layers(plan: Plan, row: RoleMemory) -> int:
    return sum(stage.end - stage.first for stage in plan.pipeline.stages[row.role.pipeline])


def device_label(plan: Plan, name: str) -> str:
    """Return words for a purpose of a plan's memory."""
    return LABELS[name].replace("fp32 sums", f"{plan.gradients} sums")


def _breakdown(plan: Plan, budget: Budget) -> Iterator[tuple[str, str, str]]:
    fullest, limit = budget.fullest, budget.limit
    whole = limit or fullest.total
    for name, count in fullest.device.items():
        if count:
            yield device_label(plan, name), units.size(count), f"{count / whole:.1%}"
    yield "total", units.size(fullest.total), f"{fullest.total / whole:.1%}"
    if limit is not None:
        left = limit - fullest.total
        yield "accelerator.memory", units.size(limit), "100.0%"
        yield ("left" if left >= 0 else "missing"), units.size(abs(left)), f"{abs(left) / whole:.1%}"


def most_outside(budget: Budget) -> RoleMemory:
    """Return the first role of those that take most of the host's memory, and most files."""
    return max(budget.rows, key=lambda row: (sum(row.host.values()), row.files))


def _outside(budget: Budget) -> Iterator[tuple[str, str, str]]:
    """Yield rows about the host's memory and files of the rank that takes most of them."""
    row = most_outside(budget)
    whole = budget.host_limit
    for name, count in row.host.items():
        if count:
            yield f"{LABELS[name]}, in the host's memory", units.size(count), f"{count / whole:.1%}" if whole else ""
    if whole and any(row.host.values()):
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


def _group(plan: Plan, alike: Sequence[RoleMemory], fullest: RoleMemory) -> Sequence[object]:
    first, last = alike[0], alike[-1]
    states = sum(first.device[name] for name in STATES)
    places = sorted({first.role.pipeline, last.role.pipeline})
    return (
        f"{sum(row.role.ranks for row in alike):,}",
        first.role.rank,
        "-".join(map(str, places)),
        _layers(plan, first),
        units.number(first.role.parameters),
        units.size(states),
        units.size(first.total - states),
        units.size(first.total),
        "fullest" if first.total == fullest.total else "",
    )


def _traffic_table(traffic: Sequence[RoleTraffic]) -> tuple[tuple[str, ...], list[Sequence[object]]]:
    """Return the columns and rows of a table of traffic: a row for each tier of each group of ranks that send alike."""
    used = [name for name in PURPOSES if any(name in sent for row in traffic for sent in row.sent.values())]
    rows: list[Sequence[object]] = []
    for _, alike in groupby(traffic, key=lambda row: row.sent):
        group = list(alike)
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
    yield from least_rows(view.least, host=not view.lanes)
    yield from played_rows(view.played, view.lanes)
    yield from hold_rows(view.save)
    for sentence in unknown_rates(view.plan, view.lanes, view.played):
        yield "rates", sentence
