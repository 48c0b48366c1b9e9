"""The programs of all ranks of a run, with what they depend on. No torch in here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from llmtrain.cluster.layout import Axis
from llmtrain.plan.per_rank.replica_groups import REPLICA_GROUPS, ReplicaGroup, replica_groups
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.build import Programs, evaluation_actions
from llmtrain.plan.program.instructions import Gather, Issue, Program, Reduce, ReplicaSum
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.plan.program.transfers import Lane, Transfer, UnitTraffic, lane_members, unit_traffic
from llmtrain.plan.traffic import Traffic
from llmtrain.plan.validation.places import ProgramPlace, program_issues

Started = tuple[Transfer, ProgramPlace]
"""A collective, and where a rank starts it."""


@dataclass(frozen=True, eq=False)
class RankPart:
    """What the programs of the data-parallel ranks with one pipeline rank and tensor rank depend on. units: how
    each unit is gathered and reduced, in the order of the updates. groups: ranks of each group of sums over replicas.
    evaluates: whether the programs are those of an evaluation, after which nothing is updated."""

    spec: ProgramSpec
    units: Mapping[str, UnitTraffic]
    groups: Mapping[ReplicaGroup, int] = field(default_factory=dict)
    evaluates: bool = False
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

    def partial(self, issue: Issue) -> Iterator[Transfer]:
        """Yield the sum of TP-replicated gradients before a reduction, if it has one."""
        if isinstance(issue, Reduce) and issue.partial:
            unit, buffered = self.units.get(issue.unit), issue.offset is not None
            element = 4 if unit is None else unit.reduced_bytes(buffered)
            yield self._sum("partial", issue.unit, issue.partial * element)

    def final(self, one: ReplicaSum) -> Transfer:
        """Return the collective of a sum after the passes."""
        return self._sum(one.group, one.unit or "all units", self._sum_bytes(one.unit) * one.elements)

    def _sum_bytes(self, unit: str) -> int:
        """Bytes of an element of the sums of a unit's gradients. The mean over a stage's ranks is in fp32."""
        return self.units[unit].sum_bytes if unit in self.units else 4

    def _sum(self, group: ReplicaGroup, unit: str, size: int) -> Transfer:
        ranks = self.groups.get(group, 1)
        traffic = Traffic("replicated", "all_reduce", "", size, 2 * size * (ranks - 1) // max(ranks, 1), packed=False)
        return Transfer(unit, Lane(group, (), ranks), traffic)

    @cached_property
    def updates(self) -> tuple[tuple[Transfer, ...], ...]:
        """The collectives of each unit's update after the step."""
        if self.evaluates:
            return tuple(() for _ in self.units)
        return tuple(tuple(unit.update()) for unit in self.units.values())

    def lanes(self, program: Program) -> dict[Lane, list[Started]]:
        """Return the collectives of a step, lane by lane: those of a program, and those of the updates after it."""
        found: dict[Lane, list[Started]] = {}
        for place, issue in program_issues(program):
            for transfer in (*self.partial(issue), *self.transfers(issue)):
                found.setdefault(transfer.lane, []).append((transfer, place))
        for one in program.finish:
            transfer = self.final(one)
            found.setdefault(transfer.lane, []).append((transfer, ProgramPlace(ends=True)))
        for update in self.updates:
            for transfer in update:
                found.setdefault(transfer.lane, []).append((transfer, ProgramPlace()))
        return found


@dataclass(frozen=True, eq=False)
class RankPrograms:
    """The programs of all ranks of a plan. programs: by rank; equal ranks share one object. groups: sizes of the groups
    of microbatches, if the programs are those of an evaluation; None for a step."""

    plan: Plan
    programs: Mapping[int, Program]
    groups: Sequence[int] | None = None
    _members: dict[tuple[int, Lane], tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def parts(self) -> Mapping[tuple[int, int], RankPart]:
        """By pipeline rank and tensor rank."""
        found = {}
        for rank in range(self.plan.grid.world):
            if self.coordinates(rank) not in found:
                found[self.coordinates(rank)] = self._part(rank)
        return found

    def _part(self, rank: int) -> RankPart:
        spec, units = ProgramSpec.of(self.plan, rank), {one.spec.name: one for one in unit_traffic(self.plan, rank)}
        if self.groups is not None:
            actions = evaluation_actions(len(spec.stages), self.groups)
            spec = replace(spec, actions=tuple(actions), finish=())
        sizes = {name: len(members) for name, members in replica_groups(self.plan, rank).items()}
        return RankPart(spec, units, sizes, self.groups is not None)

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return the pipeline rank and the tensor rank of a rank of the run."""
        grid = self.plan.grid
        return grid.coordinate(rank, Axis.PIPELINE), grid.coordinate(rank, Axis.TENSOR)

    def part(self, rank: int) -> RankPart:
        """Return the part of a rank."""
        return self.parts[self.coordinates(rank)]

    def members(self, rank: int, lane: Lane, unit: str) -> tuple[int, ...]:
        """Return the ranks of a lane's group that `rank` is in. unit: one that is sent on the lane."""
        if (rank, lane) not in self._members:
            if lane.kind in REPLICA_GROUPS:
                # Another check reports a rank that is in no such group.
                members = replica_groups(self.plan, rank).get(lane.kind, (rank,))
            else:
                members = lane_members(self.plan.grid, rank, self.plan.sharding.placements[unit], lane)
            self._members.update({(member, lane): members for member in members})
        return self._members[rank, lane]


def step_programs(plan: Plan) -> dict[int, Program]:
    """Return the programs of a step of all ranks of a plan, by rank. Equal ranks share one object."""
    return _programs(plan, lambda programs: programs.step)


def evaluation_programs(plan: Plan, groups: Sequence[int]) -> dict[int, Program]:
    """Return the programs of an evaluation of all ranks of a plan, as `step_programs` does. groups: see
    `Programs.evaluation`."""
    return _programs(plan, lambda programs: programs.evaluation(groups))


def _programs(plan: Plan, of: Callable[[Programs], Program]) -> dict[int, Program]:
    made: dict[tuple[object, ...], Program] = {}
    by_coordinates: dict[tuple[int, int], Program] = {}
    programs: dict[int, Program] = {}
    for rank in range(plan.grid.world):
        coordinates = plan.grid.coordinate(rank, Axis.PIPELINE), plan.grid.coordinate(rank, Axis.TENSOR)
        if coordinates not in by_coordinates:
            spec = ProgramSpec.of(plan, rank)
            # Tensor-parallel ranks differ in the sizes of their units at most.
            key = (coordinates[0], *spec.padded.items())
            if key not in made:
                made[key] = of(Programs(spec))
            by_coordinates[coordinates] = made[key]
        programs[rank] = by_coordinates[coordinates]
    return programs
