"""The programs of all ranks of a run, with what they depend on. No torch in here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from llmtrain.cluster.layout import Axis
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.instructions import Gather, Issue, Program, Reduce
from llmtrain.plan.program.problems.places import Place, program_issues
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.plan.program.transfers import Lane, Transfer, UnitTraffic, lane_members, unit_traffic

Started = tuple[Transfer, Place]
"""A collective, and where a rank starts it."""


@dataclass(frozen=True, eq=False)
class Part:
    """What the programs of the data-parallel ranks at one place of the pipeline and tensor axes depend on. units: how
    each unit travels, in the order of the updates."""

    spec: ProgramSpec
    units: Mapping[str, UnitTraffic]
    _transfers: dict[tuple[object, ...], tuple[Transfer, ...]] = field(default_factory=dict)

    def transfers(self, issue: Issue) -> tuple[Transfer, ...]:
        """Return the collectives of an instruction, in order; none for a unit that the rank does not hold."""
        if isinstance(issue, Gather):
            key: tuple[object, ...] = (Gather, issue.unit, issue.secondary)
        elif isinstance(issue, Reduce):
            key = (Reduce, issue.unit, issue.offset is None, issue.last)
        else:
            return ()
        if key not in self._transfers:
            self._transfers[key] = tuple(self.units[issue.unit].of(issue)) if issue.unit in self.units else ()
        return self._transfers[key]

    @cached_property
    def updates(self) -> tuple[tuple[Transfer, ...], ...]:
        """The collectives of each unit's update after the step."""
        return tuple(tuple(unit.update()) for unit in self.units.values())

    def lanes(self, program: Program) -> dict[Lane, list[Started]]:
        """Return the collectives of a step, lane by lane: those of a program, and those of the updates after it."""
        found: dict[Lane, list[Started]] = {}
        for place, issue in program_issues(program):
            for transfer in self.transfers(issue):
                found.setdefault(transfer.lane, []).append((transfer, place))
        for update in self.updates:
            for transfer in update:
                found.setdefault(transfer.lane, []).append((transfer, Place()))
        return found


@dataclass(frozen=True, eq=False)
class RankPrograms:
    """The programs of all ranks of a plan. programs: by rank; ranks with the same object are alike."""

    plan: Plan
    programs: Mapping[int, Program]
    _members: dict[tuple[int, Lane], tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def parts(self) -> Mapping[tuple[int, int], Part]:
        """By place along the pipeline and the tensor axis."""
        found = {}
        for rank in range(self.plan.grid.world):
            if self.place(rank) not in found:
                units = {unit.spec.name: unit for unit in unit_traffic(self.plan, rank)}
                found[self.place(rank)] = Part(ProgramSpec.of(self.plan, rank), units)
        return found

    def place(self, rank: int) -> tuple[int, int]:
        """Return the place of a rank along the pipeline and the tensor axis."""
        grid = self.plan.grid
        return grid.coordinate(rank, Axis.PIPELINE), grid.coordinate(rank, Axis.TENSOR)

    def part(self, rank: int) -> Part:
        """Return the part of a rank."""
        return self.parts[self.place(rank)]

    def members(self, rank: int, lane: Lane, unit: str) -> tuple[int, ...]:
        """Return the ranks of a lane's group that `rank` is in. unit: one that travels on the lane."""
        if (rank, lane) not in self._members:
            placement = self.plan.sharding.placements[unit]
            members = lane_members(self.plan.grid, rank, placement, lane)
            self._members.update({(member, lane): members for member in members})
        return self._members[rank, lane]


def step_programs(plan: Plan) -> dict[int, Program]:
    """Return the programs of a step of all ranks of a plan, by rank. Ranks that are alike share one object."""
    made: dict[tuple[object, ...], Program] = {}
    by_place: dict[tuple[int, int], Program] = {}
    programs: dict[int, Program] = {}
    for rank in range(plan.grid.world):
        place = plan.grid.coordinate(rank, Axis.PIPELINE), plan.grid.coordinate(rank, Axis.TENSOR)
        if place not in by_place:
            spec = ProgramSpec.of(plan, rank)
            # Tensor-parallel ranks differ in the sizes of their units at most.
            key = (place[0], *spec.padded.items())
            if key not in made:
                made[key] = Programs(spec).step
            by_place[place] = made[key]
        programs[rank] = by_place[place]
    return programs
