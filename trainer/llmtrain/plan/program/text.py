"""A program as text. No torch in here."""

from collections.abc import Iterable, Iterator

from llmtrain.plan.program.instructions import At, Drop, Gather, Issue, Pass, Point, Program, ReplicaSum


def program_lines(program: Program) -> Iterator[str]:
    """Yield a program's lines: the order of passes, and what each of them issues at which point. Passes that issue the
    same share their lines."""
    yield "order: " + " ".join(str(one.action) for one in program.passes)
    yield "start: " + (_said(program.start) or "nothing")
    by_lines: dict[tuple[str, ...], list[Pass]] = {}
    for one in program.passes:
        by_lines.setdefault(tuple(_lines(one)), []).append(one)
    for lines, passes in by_lines.items():
        yield " ".join(str(one.action) for one in passes) + ":" + ("" if lines else " nothing to issue")
        yield from (f"  {line}" for line in lines)
    if program.finish:
        yield "finish: " + ", ".join(map(_summed, program.finish))


def _lines(one: Pass) -> Iterator[str]:
    """Yield a line for each point at which something is issued."""
    for point in one.points:
        if point.issues:
            yield f"{_when(point)}: {_said(point.issues)}"


def _when(point: Point) -> str:
    return {
        At.USE: f"before {point.unit}",
        At.DONE: f"after {point.unit}",
        At.GRADIENTS: f"gradients of {point.unit}",
    }[point.at]


def _said(issues: Iterable[Issue]) -> str:
    return ", ".join(map(_verb, issues))


def _verb(issue: Issue) -> str:
    if isinstance(issue, Drop):
        return f"drop {issue.unit}"
    if isinstance(issue, Gather):
        source = (
            " from the secondary copy" if issue.secondary else " and fill the secondary copy" if issue.fills else ""
        )
        return f"gather {issue.unit}{source}"
    partial = "sum the TP-replicated part, " if issue.partial else ""
    return partial + ("reduce, complete the step's sum" if issue.last else "reduce")


def _summed(one: ReplicaSum) -> str:
    over = {"partial": "the tensor-parallel ranks", "stage": "the stage", "tied": "the first and the last stage"}
    what = {"partial": f"the TP-replicated part of {one.unit}", "stage": "all TP-replicated parts", "tied": one.unit}
    return f"sum {what[one.group]} over {over[one.group]}"
