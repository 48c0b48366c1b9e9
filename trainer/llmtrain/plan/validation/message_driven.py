"""Whether only messages depend on the order in which message-driven runs forward and backward passes.

The order of forward passes is fixed, that of backward passes too, and a microbatch's forward pass comes before its
backward pass. The first forward pass is therefore the first pass in every order. If all gathers are issued by then and
all reductions in backward passes, then each lane has one order, whatever the passes' order. No torch in here.
"""

from collections.abc import Iterator

from llmtrain.plan.pipeline.actions import Action, Kind
from llmtrain.plan.program.instructions import At, Drop, Gather, Program
from llmtrain.plan.validation.places import ProgramPlace, pass_issues


def message_driven_problems(program: Program) -> Iterator[str]:
    """Yield the instructions whose order, or whose effect, depends on the order of passes."""
    for one in program.passes:
        for place, issue in pass_issues(one):
            if isinstance(issue, Drop):
                yield from _drop_problems(program, one.action, place, issue)
            elif isinstance(issue, Gather):
                if one.action != Action(0, 0, Kind.F):
                    yield (
                        f"{place}: it gathers {issue.unit} after the first forward pass, so that the order of gathers "
                        "depends on that of messages"
                    )
            elif one.action.kind is Kind.F:
                yield (
                    f"{place}: it reduces {issue.unit} in a forward pass, so that the order of reductions depends on "
                    "that of messages"
                )


def _drop_problems(program: Program, action: Action, place: ProgramPlace, drop: Drop) -> Iterator[str]:
    """Yield the first pass that may run after a drop and uses the unit, unless the first forward pass gathers the unit
    again."""
    first = program.passes[0]
    gathers = [isinstance(issue, Gather) for _, issue in pass_issues(first) if issue.unit == drop.unit]
    if action == first.action and gathers[-1]:
        return
    for other in program.passes:
        uses = any((point.at, point.unit) == (At.USE, drop.unit) for point in other.points)
        if uses and _may_follow(action, other.action):
            yield f"{place}: it drops {drop.unit}, but messages may let pass {other.action} use {drop.unit} later"
            return


def _may_follow(action: Action, other: Action) -> bool:
    """Whether an order exists in which `other` runs after `action`."""
    if action.kind is Kind.F and other.kind is Kind.B:
        return True
    return other.microbatch > action.microbatch
