"""Where in a program something happens. No torch in here."""

from collections.abc import Iterator
from dataclasses import dataclass

from llmtrain.plan.pipeline.actions import Action
from llmtrain.plan.program.instructions import Issue, Pass, Point, Program


@dataclass(frozen=True, slots=True)
class ProgramPlace:
    """A place in a program. action: the action of the pass; None for the start, or for what comes after the passes if
    `ends`. point: None for the pass as a whole."""

    action: Action | None = None
    point: Point | None = None
    ends: bool = False

    def __str__(self) -> str:
        if self.action is None:
            return "end of the passes" if self.ends else "start"
        return f"pass {self.action}" + (f", {self.point}" if self.point else "")


def pass_issues(one: Pass) -> Iterator[tuple[ProgramPlace, Issue]]:
    """Yield what a pass issues, and where."""
    for point in one.points:
        place = ProgramPlace(one.action, point)
        yield from ((place, issue) for issue in point.issues)


def program_issues(program: Program) -> Iterator[tuple[ProgramPlace, Issue]]:
    """Yield what a program issues, and where."""
    yield from ((ProgramPlace(), issue) for issue in program.start)
    for one in program.passes:
        yield from pass_issues(one)


def ranges_overlap(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether two ranges `[start, end)` share an element."""
    return first[0] < second[1] and second[0] < first[1]
