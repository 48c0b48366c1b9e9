"""The instructions of a rank's step, lane by lane, in the order in which the rank issues them. No torch in here."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from llmtrain_data import units

from llmtrain.cluster.tiers import tier_between
from llmtrain.errors import BadInputError
from llmtrain.plan.pipeline.actions import Kind
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.by_rank import programs_of
from llmtrain.plan.program.instructions import Drop, Issue, Pass, Program
from llmtrain.plan.program.residency_bound import GatherGap, gather_gap
from llmtrain.plan.program.text import program_lines
from llmtrain.plan.program.transfers import Transfer, UnitTraffic, lane_members, unit_traffic

COMPUTE = "compute"
"""The lane of passes."""


@dataclass(frozen=True)
class Bar:
    """An instruction. lane: name of its lane. start, end: positions in the order of what the rank issues; a pass spans
    what it issues. purpose: the purpose of a collective, or the kind of a pass."""

    lane: str
    start: int
    end: int
    text: str
    purpose: str


@dataclass(frozen=True)
class InOrder:
    """The instructions of a rank of the run. gap: what it gathers beyond the least."""

    plan: Plan
    rank: int
    program: Program
    gap: GatherGap

    @classmethod
    def of(cls, plan: Plan, rank: int) -> "InOrder":
        """Return the instructions of a rank. Raises BadInputError if the run does not have it."""
        if rank >= plan.grid.world:
            ranks = f"{plan.grid.world} ranks, counted from 0" if plan.grid.world > 1 else "rank 0 alone"
            raise BadInputError(f"--program is {rank}, but the run has {ranks}; name one that it has")
        programs = programs_of(plan)(rank)
        return cls(plan, rank, programs.step, gather_gap(programs))

    def as_data(self) -> dict[str, Any]:
        """Return the program as plain data, for JSON."""
        return {"rank": self.rank, "program": list(program_lines(self.program)), "gathered": asdict(self.gap)}

    def lines(self) -> Iterator[str]:
        """Yield the program as text."""
        yield from program_lines(self.program)
        if self.gap.gathered > self.gap.least:
            gathered, least = (units.number(count) for count in (self.gap.gathered, self.gap.least))
            yield (
                f"gathers {gathered} elements of weights, {self.gap.share:.1%} above the bound of {least} for units of "
                "unlike sizes in this memory"
            )

    def bars(self) -> list[Bar]:
        """Return a bar for each pass, for each hop of a gather or reduction, and for the updates after the step."""
        by_name = {unit.spec.name: unit for unit in unit_traffic(self.plan, self.rank)}
        found: list[Bar] = []
        position = self._issue(found, by_name, self.program.start, 0)
        for one in self.program.passes:
            first = position
            for point in one.points:
                position = self._issue(found, by_name, point.issues, position)
            position = max(position, first + 1)
            found.append(Bar(COMPUTE, first, position, str(one.action), _kind(one)))
        for unit in by_name.values():
            updates = list(self._transfers(unit, unit.update(), position))
            found += updates
            position += len(updates) > 0
        return found

    def _issue(self, bars: list[Bar], by_name: dict[str, UnitTraffic], issues: tuple[Issue, ...], position: int) -> int:
        """Add the bars of issues from `position` on; return the position after them."""
        for issue in issues:
            if not isinstance(issue, Drop):
                unit = by_name[issue.unit]
                bars += self._transfers(unit, unit.of(issue), position)
                position += 1
        return position

    def _transfers(self, unit: UnitTraffic, transfers: Iterator[Transfer], position: int) -> Iterator[Bar]:
        for transfer in transfers:
            ranks = lane_members(self.plan.grid, self.rank, unit.placement, transfer.lane)
            tier = tier_between(self.plan.tiers, min(ranks), max(ranks))
            lane = f"{transfer.lane.kind} over {len(ranks)} ranks, {tier}"
            yield Bar(lane, position, position + 1, transfer.unit.removeprefix("blocks."), transfer.traffic.purpose)


def _kind(one: Pass) -> str:
    return {Kind.F: "forward", Kind.B: "backward", Kind.W: "backward of the weights"}[one.action.kind]
