"""Passes that repeat in one order through most of a step. A few periods of them are planned, and stand for the others.

No torch in here.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llmtrain.plan.pipeline.actions import Action, computations
from llmtrain.plan.program.instructions import Drop, Gather, Issue, Pass, Program

_KEPT = 3
"""Periods that are planned at each end of a repetition. What is gathered ahead, and what is dropped, depends on uses of
at most two periods."""


@dataclass(frozen=True)
class Repeat:
    """A part of a sequence that repeats. start: index, in the shortened sequence, of the first pass of the
    period that stands for the left out ones. length: passes of a period. copies: periods that are left out."""

    start: int
    length: int
    copies: int


@dataclass(frozen=True)
class Shortened:
    """A sequence of actions without the middle of each repetition. kept: indices in the whole sequence."""

    whole: Sequence[Action]
    kept: Sequence[int]
    repeats: Sequence[Repeat]

    @property
    def actions(self) -> list[Action]:
        """The actions that are planned."""
        return [self.whole[index] for index in self.kept]

    def extended(self, program: Program) -> Program | None:
        """Return the program of the whole sequence from that of the shortened one; None if the periods that stand for
        those left out differ."""
        gathered = list(_gathered(program))
        for repeat in self.repeats:
            first, second = repeat.start, repeat.start + repeat.length
            pairs = zip(program.passes[first:second], program.passes[second : second + repeat.length], strict=True)
            if gathered[first] != gathered[second] or any(not _repeats(one, other) for one, other in pairs):
                return None
        passes = program.passes
        stood_for = [Pass(action, *passes[index][1:]) for index, action in self._stand_ins()]
        return replace(program, passes=tuple(stood_for))

    def _stand_ins(self) -> Iterator[tuple[int, Action]]:
        """Yield, for each action of the whole sequence, the index of its pass in the shortened one."""
        indices: list[int] = []
        done = 0
        for repeat in self.repeats:
            end = repeat.start + repeat.length
            indices += range(done, end)
            indices += list(range(repeat.start, end)) * repeat.copies
            done = end
        indices += range(done, len(self.kept))
        return zip(indices, self.whole, strict=True)


def shorten(actions: Sequence[Action], periods: int) -> Shortened:
    """Leave out the middle of each repetition. periods: how many periods of the schedule make a period here."""
    least = 2 * _KEPT * periods
    keys = _keys(actions)
    # The shortest period that repeats often enough.
    pattern = re.compile(rf"(.{{1,{max(1, len(keys) // least)}}}?)\1{{{least - 1},}}", re.DOTALL)
    kept: list[int] = []
    repeats: list[Repeat] = []
    done = 0
    for found in pattern.finditer(keys):
        length = len(found[1]) * periods
        copies = (found.end() - found.start()) // length - 2 * _KEPT
        if copies < 1:
            continue
        stays = found.start() + _KEPT * length
        kept += range(done, stays)
        repeats.append(Repeat(len(kept) - length, length, copies))
        done = stays + copies * length
    return Shortened(actions, [*kept, *range(done, len(actions))], repeats)


def _keys(actions: Sequence[Action]) -> str:
    """Return a letter for each action: the same for the same computation of another microbatch."""
    kinds = computations(actions)
    letters = {one: chr(index) for index, one in enumerate(dict.fromkeys(kinds))}
    return "".join(map(letters.__getitem__, kinds))


def _repeats(one: Pass, other: Pass) -> bool:
    return one.points == other.points and one.backward == other.backward


def _gathered(program: Program) -> Iterator[dict[str, Gather]]:
    """Yield the gathered units before each pass, each with its gather."""
    gathered: dict[str, Gather] = {}
    _follow(gathered, program.start)
    for one in program.passes:
        yield dict(gathered)
        for point in one.points:
            _follow(gathered, point.issues)


def _follow(gathered: dict[str, Gather], issues: Sequence[Issue]) -> None:
    for issue in issues:
        if isinstance(issue, Gather):
            # Whether it filled a secondary copy no longer matters.
            gathered[issue.unit] = replace(issue, fills=False) if issue.fills else issue
        elif isinstance(issue, Drop):
            del gathered[issue.unit]
