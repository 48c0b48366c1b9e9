"""Follows a program while its passes run."""

from llmtrain.plan.pipeline.actions import Action
from llmtrain.plan.program.instructions import At, Issue, Pass, Program


class ProgramCursor:
    """How far a rank is in its program."""

    def __init__(self, program: Program) -> None:
        self._program, self._left = program, len(program.passes)
        self._pass: Pass | None = None
        # Points of the pass that were reached.
        self._reached = 0

    def begin(self, action: Action) -> Pass:
        """Begin an action's pass, unless it has begun, and return it. Raises RuntimeError if the pass before is not
        complete."""
        if self._pass is None or self._pass.action != action:
            self._complete()
            self._pass, self._reached = self._program.by_action[action], 0
            self._left -= 1
        return self._pass

    def reach(self, at: At, unit: str) -> tuple[Issue, ...]:
        """Report a named point, and return what is issued there. Raises RuntimeError if the program has another one."""
        points = () if self._pass is None else self._pass.points[self._reached : self._reached + 1]
        if not points or (points[0].at, points[0].unit) != (at, unit):
            expected = points[0] if points else "its end"
            raise RuntimeError(f"{self._named()} reached {at.value} {unit}, but its program has {expected}")
        self._reached += 1
        return points[0].issues

    def finish(self) -> None:
        """Raise RuntimeError if the program is not complete."""
        self._complete()
        if self._left:
            raise RuntimeError(f"{self._left} passes of the program did not run")

    def _complete(self) -> None:
        if self._pass is not None and self._reached < len(self._pass.points):
            raise RuntimeError(f"{self._named()} ended before {self._pass.points[self._reached]}")

    def _named(self) -> str:
        return "no pass" if self._pass is None else f"pass {self._pass.action}"
