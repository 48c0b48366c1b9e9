"""What the program of a rank depends on, taken from the plan. No torch in here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.levels import Degrees
from llmtrain.plan.per_rank.offloaded_weights import stored_elements
from llmtrain.plan.per_rank.rank_units import rank_units
from llmtrain.plan.pipeline.actions import Action, Kind, Schedule
from llmtrain.plan.pipeline.stage_layout import StageLayout
from llmtrain.plan.placement import PAGE, UNIT_ALIGNMENT, Placement
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.instructions import BackwardPass, ReplicaSum
from llmtrain.plan.program.replica_sums import final_sums, partial_elements


@dataclass(frozen=True, kw_only=True)
class ProgramSpec:
    """One rank's part of a plan.

    stages: the rank's stages, by chunk. actions: those of one step, in order. splits_backward: whether the backward
    pass of weights is an action of its own. ordered: whether actions run in this order; otherwise messages mix forward
    and backward passes, and weights stay gathered. padded, degrees: the padded size of each unit, and the degrees of
    its shards. rounded: whether weights from the secondary copy differ from those of the shards. resident: elements of
    memory for gathered weights; 0 for the least in which two units are gathered ahead. offloaded_weights: units whose
    weights are offloaded. stored: by such a unit, the number of elements of its shard that the device has after a step,
    and that are then stored. offloaded_gradients: units whose sums of gradients are offloaded. granule: buffers of
    gathered weights begin at its multiples. partial: elements of each unit whose gradients tensor-parallel ranks sum
    before the reduction. finish: sums after the last pass. sums_runs: whether gradients of consecutive backward passes
    of a stage are summed in buffers before they are reduced.
    """

    stages: tuple[StageLayout, ...]
    actions: tuple[Action, ...]
    splits_backward: bool = False
    ordered: bool = True
    padded: Mapping[str, int]
    degrees: Mapping[str, Degrees]
    rounded: bool = False
    resident: int = 0
    offloaded_weights: frozenset[str] = frozenset()
    stored: Mapping[str, int] = field(default_factory=dict)
    offloaded_gradients: frozenset[str] = frozenset()
    granule: int = 1
    partial: Mapping[str, int] = field(default_factory=dict)
    finish: tuple[ReplicaSum, ...] = ()
    sums_runs: bool = False

    def __hash__(self) -> int:
        """Return a hash of some of the fields; mappings have none."""
        return hash((len(self.actions), self.resident, tuple(self.padded.values())))

    @classmethod
    def of(cls, plan: Plan, rank: int) -> "ProgramSpec":
        """Return the part of a rank of the run."""
        stages, schedule, grid = plan.stages_of(rank), plan.pipeline.schedule, plan.grid
        specs = rank_units(plan, rank)
        placements = {spec.name: plan.sharding.placements[spec.name] for spec in specs}
        return cls(
            stages=stages,
            actions=_actions(schedule, grid.coordinate(rank, Axis.PIPELINE)),
            splits_backward=schedule.splits_backward,
            ordered=not schedule.message_driven,
            padded={spec.name: placements[spec.name].padded(spec.numel) for spec in specs},
            degrees={name: placement.degrees for name, placement in placements.items()},
            rounded=plan.sharding.quantization.secondary > 0,
            resident=plan.sharding.resident // plan.compute_bytes,
            offloaded_weights=frozenset(name for name, placement in placements.items() if placement.moves_weights),
            stored={spec.name: stored_elements(plan, spec) for spec in specs if placements[spec.name].moves_weights},
            offloaded_gradients=frozenset(name for name, placement in placements.items() if placement.moves_gradients),
            granule=_granule(placements.values(), plan.compute_bytes),
            partial=partial_elements(plan, rank, specs),
            finish=tuple(final_sums(plan, rank, specs)),
            sums_runs=plan.sums_runs,
        )

    def is_gathered(self, unit: str) -> bool:
        """Whether a unit's weights are gathered before they are used: they are sharded, or offloaded."""
        return self.degrees[unit].weights > 1 or unit in self.offloaded_weights

    def is_reduced(self, passed: BackwardPass) -> bool:
        """Whether a backward pass reduces its unit's gradients."""
        if self.is_buffered(passed.unit):
            return passed.ends_run
        return passed.last and self.degrees[passed.unit].ranks > 1

    def is_buffered(self, unit: str) -> bool:
        """Whether a buffer holds the gradients of a run of backward passes, because their sum is sharded or
        offloaded."""
        return self.degrees[unit].gradients > 1 or unit in self.offloaded_gradients

    @property
    def tied(self) -> bool:
        """Whether the rank's head computes with the embedding's weights."""
        return any(layout.closes and layout.tied for layout in self.stages)


def _granule(placements: Iterable[Placement], compute_bytes: int) -> int:
    """Return the elements at whose multiples buffers of gathered weights begin. Copies and matrix products are fast
    where addresses are multiples of 16 bytes. Where all shards in files are whole pages, buffers are too: these are
    read without a copy."""
    page = PAGE // compute_bytes
    in_files = [placement for placement in placements if placement.weights_on == "nvme"]
    return page if in_files and all(placement.alignment % page == 0 for placement in in_files) else UNIT_ALIGNMENT


def _actions(schedule: Schedule, rank: int) -> tuple[Action, ...]:
    """Return the actions of a rank of the pipeline. With message-driven: all forward passes, then all backward passes;
    arriving messages mix them, but keep the order of each kind."""
    if not schedule.message_driven:
        return schedule.actions[rank]
    return tuple(Action(index, 0, kind) for kind in (Kind.F, Kind.B) for index in range(schedule.microbatches))
