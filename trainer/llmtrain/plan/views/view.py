"""What a run will take before it starts, as plain data. No torch in here."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmtrain.model.tensors import parameter_count
from llmtrain.plan.collection import without_collection
from llmtrain.plan.cost.lane_times import CPU, LaneTime, lane_times
from llmtrain.plan.cost.least_time import LeastTime, least_time, step_threads
from llmtrain.plan.cost.save_hold import SaveHold, save_hold
from llmtrain.plan.cost.simulated_step import SimulatedStep, rank_computation, simulated_step
from llmtrain.plan.cost.step_traffic import RoleTraffic, step_traffic
from llmtrain.plan.cost.volume_traffic import Moved, moved_of
from llmtrain.plan.cost.wire_times import WireTime, wire_times
from llmtrain.plan.memory.memory_budget import Budget, RoleMemory, memory_budget
from llmtrain.plan.per_rank.near_volumes import VolumeShare, volume_shares
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.by_rank import programs_of
from llmtrain.plan.record import decisions
from llmtrain.plan.resolve.check import advice, check
from llmtrain.plan.resolve.described import assumed, described_run
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.refusal import refusal
from llmtrain.plan.views.times_shown import slow_links, unknown_rates


@dataclass(frozen=True, kw_only=True)
class PlanView:
    """A plan and what it takes. problem: why it does not fit the stated memory, None if it does. auto: one line for
    each decision. advice: sentences on settings that are likely mistakes. moved: bytes that the rank with most files
    reads from and writes to volumes in a step. lane_times: least times of the lanes that move offloaded states and
    activations. wires: least times of the links between ranks. simulated: the step of the rank with most files,
    simulated; None if no optimizer states leave. save: how long a checkpoint holds it up."""

    plan: Plan
    budget: Budget
    traffic: Sequence[RoleTraffic]
    moved: Mapping[str, Moved]
    lane_times: Sequence[LaneTime]
    wires: Sequence[WireTime]
    simulated: SimulatedStep | None
    save: SaveHold | None
    least: LeastTime
    problem: str | None
    auto: Sequence[str]
    advice: Sequence[str]

    @property
    def step_threads(self) -> int | None:
        """The threads with which each rank steps offloaded states; None where torch decides."""
        return None if self.plan.device == "cpu" else step_threads(self.plan)

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
            "device": self.plan.device,
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
            "moved": {"rank": most_offloaded(budget).role.rank, "volumes": self.moved},
            "lanes": [one.as_data() for one in self.lane_times],
            "wires": [one.as_data() for one in self.wires],
            "simulated": None if self.simulated is None else asdict(self.simulated),
            "save": None if self.save is None else {**asdict(self.save), "held": self.save.held},
            "unknown_rates": unknown_rates(plan, self.lane_times, self.simulated),
            "least_seconds": asdict(self.least),
            "step_threads": self.step_threads,
            "volumes": [asdict(one) for one in self.volumes],
            "problem": self.problem,
            "advice": list(self.advice),
            "auto": list(self.auto),
        }


def view_recipe(name_or_path: str, overrides: Sequence[str], ranks: int | None) -> PlanView:
    """Return the view of a recipe's plan on a described cluster. ranks: see `described_run`. Raises BadInputError."""
    # A large plan makes millions of objects.
    with without_collection():
        return _view(name_or_path, overrides, ranks)


def _view(name_or_path: str, overrides: Sequence[str], ranks: int | None) -> PlanView:
    recipe, facts = described_run(name_or_path, overrides, ranks)
    plan = make_plan(recipe, facts)
    check(plan, facts)
    programs = programs_of(plan)
    budget, moved = memory_budget(plan, programs), moved_of(plan, programs)
    found, role = lane_times(plan, programs, moved), most_offloaded(budget).role
    traffic, least = step_traffic(plan, programs), least_time(plan, found)
    wires = wire_times(plan, programs, traffic)
    simulated, computation = simulated_step(plan, role.rank, found), rank_computation(plan, role.rank)
    return PlanView(
        plan=plan,
        budget=budget,
        traffic=traffic,
        moved=moved(role.rank),
        lane_times=found if simulated is not None or any(lane.name != CPU for lane in found) else (),
        wires=wires,
        simulated=simulated,
        save=save_hold(plan, role, None if computation is None else computation.seconds),
        least=least,
        problem=refusal(recipe, facts, plan, budget),
        auto=decisions(recipe, plan.record),
        advice=[*assumed(recipe, facts, plan), *advice(recipe, plan), *slow_links(plan, wires, least)],
    )


def _role(plan: Plan, row: RoleMemory) -> dict[str, Any]:
    role = row.role
    return {
        "rank": role.rank,
        "ranks": role.ranks,
        "pipeline": role.pipeline,
        "layers": layers_of(plan, row),
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


def layers_of(plan: Plan, row: RoleMemory) -> int:
    """Return the layers of a role."""
    return sum(stage.end - stage.first for stage in plan.pipeline.stages[row.role.pipeline])


def most_offloaded(budget: Budget) -> RoleMemory:
    """Return the role that takes most of the host's memory and of files; the first one if several do."""
    return max(budget.rows, key=lambda row: (sum(row.host.values()), row.files))
