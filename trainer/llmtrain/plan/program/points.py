"""The named points of each pass: when a computation begins to need a unit's weights, and when it is done with them."""

from collections import Counter
from collections.abc import Iterator, Sequence

from llmtrain.plan.pipeline.actions import Action, Kind
from llmtrain.plan.pipeline.stage_layout import StageLayout
from llmtrain.plan.program.instructions import At, BackwardPass

Spot = tuple[At, str]
"""A point without what is issued there."""


def forward_spots(layout: StageLayout) -> Iterator[Spot]:
    """Yield the points of a forward pass. A tied head needs the embedding as well."""
    for unit in layout.units:
        if unit == "embedding" and not layout.opens:
            continue
        needed = (unit, "embedding") if unit == "head" and layout.tied else (unit,)
        yield from ((At.USE, name) for name in needed)
        yield from ((At.DONE, name) for name in needed)


def backward_spots(layout: StageLayout) -> Iterator[Spot]:
    """Yield the points of a backward pass that computes all gradients. Neither the embedding's backward pass nor that
    of the output projection needs weights: the projection's forward pass has computed its gradients."""
    if layout.closes:
        yield from _head_spots(layout)
    for group in reversed(_groups(layout)):
        yield from ((At.USE, name) for name in group)
        for name in reversed(group):
            yield from ((At.GRADIENTS, name), (At.DONE, name))
    if layout.opens:
        yield At.GRADIENTS, "embedding"


def backward_input_spots(layout: StageLayout) -> Iterator[Spot]:
    """Yield the points of a backward pass of the inputs alone. A unit's weights are no longer needed once the gradient
    of its input is complete."""
    if layout.closes:
        yield from ((At.USE, "head"), (At.DONE, "head"))
    for group in reversed(_groups(layout)):
        yield from ((At.USE, name) for name in group)
        yield from ((At.DONE, name) for name in reversed(group))


def backward_weight_spots(layout: StageLayout) -> Iterator[Spot]:
    """Yield the points of a backward pass of the weights. Autograd has computed the gradients of the embedding and of
    the head before, so these come first."""
    if layout.closes and layout.tied and not layout.opens:
        yield At.GRADIENTS, "embedding"
    if layout.closes:
        yield At.GRADIENTS, "head"
    if layout.opens:
        yield At.GRADIENTS, "embedding"
    for name in reversed(_blocks(layout)):
        yield At.GRADIENTS, name


def spots_of(action: Action, layout: StageLayout, splits_backward: bool) -> Iterator[Spot]:
    """Return the points of an action of a stage. splits_backward: whether the backward pass of weights is an action of
    its own."""
    if action.kind is Kind.F:
        return forward_spots(layout)
    if action.kind is Kind.W:
        return backward_weight_spots(layout)
    return backward_input_spots(layout) if splits_backward else backward_spots(layout)


def backward_passes(
    actions: Sequence[Action], layouts: Sequence[StageLayout], splits_backward: bool, sums_runs: bool = False
) -> list[tuple[BackwardPass, ...]]:
    """Return for each action the backward passes through its stage's units; none for actions that compute no gradients
    of weights. sums_runs: whether consecutive backward passes of one stage are a run; else each is one by itself."""
    kind = Kind.W if splits_backward else Kind.B
    passes = [action for action in actions if action.kind is kind]
    ends = _run_ends([action.chunk if sums_runs else index for index, action in enumerate(passes)])
    total = Counter(name for action in passes for name in layouts[action.chunk].units)
    done: Counter[str] = Counter()
    found = []
    for action in actions:
        layout, own = layouts[action.chunk], list[BackwardPass]()
        begins_run, ends_run = next(ends) if action.kind is kind else (False, False)
        for name in layout.units if action.kind is kind else ():
            done[name] += 1
            # A tied head uses the token matrix of the embedding alone.
            leading = name == "embedding" and not layout.opens
            first, last = done[name] == 1, done[name] == total[name]
            own.append(
                BackwardPass(
                    unit=name, first=first, last=last, leading=leading, begins_run=begins_run, ends_run=ends_run
                )
            )
        found.append(tuple(own))
    return found


def _run_ends(runs: Sequence[int]) -> Iterator[tuple[bool, bool]]:
    """Yield for each pass whether it is the first, and the last, of its run. runs: the same number for neighbours of
    one run."""
    for index, run in enumerate(runs):
        yield index == 0 or runs[index - 1] != run, index + 1 == len(runs) or runs[index + 1] != run


def _head_spots(layout: StageLayout) -> Iterator[Spot]:
    if layout.tied and not layout.opens:
        # The loss gives the matrix its gradient before the norm's backward pass begins.
        yield At.GRADIENTS, "embedding"
    yield from ((At.USE, "head"), (At.GRADIENTS, "head"), (At.DONE, "head"))


def _blocks(layout: StageLayout) -> list[str]:
    return [f"blocks.{index}" for index in range(layout.first, layout.end)]


def _groups(layout: StageLayout) -> list[list[str]]:
    """Return the blocks whose weights are used together in the backward pass."""
    groups = [[f"blocks.{index}" for index in group] for group in layout.groups]
    return groups or [[name] for name in _blocks(layout)]
