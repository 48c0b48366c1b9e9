"""The bytes that a host's processors read and write to add up offloaded gradients. No torch in here."""

from llmtrain.plan.per_rank.rank_units import rank_units
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.instructions import Reduce


def summed_on_host(plan: Plan, rank: int, programs: Programs) -> int:
    """Return the bytes of an optimizer step of a rank of the run: the first gradient is copied into the sum, and each
    further one is added to it. Nothing on a CPU, which adds up gradients wherever they rest. programs: of the rank."""
    if plan.device == "cpu":
        return 0
    placements = {unit.name: plan.sharding.placements[unit.name] for unit in rank_units(plan, rank)}
    padded = {unit.name: placements[unit.name].padded(unit.numel) for unit in rank_units(plan, rank)}
    moved, found = {name for name, placement in placements.items() if placement.moves_gradients}, 0
    for issue in programs.step.issues if moved else ():
        if isinstance(issue, Reduce) and issue.unit in moved:
            placement = placements[issue.unit]
            if issue.last and placement.hops_after_sum:
                # The device adds the last one, and the sum over further ranks takes the place of the others.
                elements, came, further = padded[issue.unit] // placement.degrees.optimizer, _BYTES, 0
            else:
                elements = padded[issue.unit] // placement.degrees.gradients
                came = _BYTES if placement.degrees.gradients > 1 else plan.buffered_gradient_bytes
                further = 0 if issue.first else _BYTES
            found += elements * (came + _BYTES + further)
    return found


_BYTES = 4
"""Bytes of an element of a sum, and of what other ranks have added to it."""
