"""The bytes that a GPU and its host copy to each other in an optimizer step that is applied. No torch in here."""

from collections.abc import Callable, Iterator

from llmtrain.plan.per_rank.offloaded_weights import offloaded_shards
from llmtrain.plan.per_rank.rank_activations import boundary_bytes, rank_counts
from llmtrain.plan.per_rank.rank_units import rank_units
from llmtrain.plan.placement import Placement
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.instructions import Gather, Reduce
from llmtrain.plan.program.offload_moves import bucket_moves

Copied = tuple[int, int]
"""Bytes copied to the host, and to the device."""


def link_traffic(plan: Plan, rank: int, programs: Programs) -> dict[str, Copied]:
    """Return the bytes that a rank of the run copies, by what they are: optimizer, weights, gradients or activations;
    nothing on a CPU. programs: of the rank."""
    if plan.device == "cpu":
        return {}
    moves, left = bucket_moves(plan, rank), rank_counts(plan, rank).left * boundary_bytes(plan)
    found = {
        "optimizer": (sum(one.down for one in moves), sum(one.up for one in moves)),
        "weights": _sum(_weights(plan, rank, programs)),
        "gradients": _sum(_gradients(plan, rank, programs)),
        "activations": (left, left),
    }
    return {name: copied for name, copied in found.items() if any(copied)}


def _sum(copied: Iterator[Copied]) -> Copied:
    both_ways = list(copied)
    return sum(down for down, _ in both_ways), sum(up for _, up in both_ways)


def _weights(plan: Plan, rank: int, programs: Programs) -> Iterator[Copied]:
    shards = {unit: numel * plan.compute_bytes for unit, numel in offloaded_shards(plan, rank).items()}
    # After the step, the elements of each shard that the device has are copied to the host once.
    yield sum(programs.spec.stored.values()) * plan.compute_bytes, 0
    for issue in programs.step.issues if shards else ():
        if isinstance(issue, Gather) and not issue.secondary:
            yield 0, shards.get(issue.unit, 0)


def _gradients(plan: Plan, rank: int, programs: Programs) -> Iterator[Copied]:
    shards = {unit.name: plan.sharding.placements[unit.name] for unit in rank_units(plan, rank)}
    padded = {unit.name: shards[unit.name].padded(unit.numel) for unit in rank_units(plan, rank)}
    copied_of = {name: _reduced(plan, shards[name], padded[name]) for name in shards if shards[name].moves_gradients}
    for issue in programs.step.issues if copied_of else ():
        if isinstance(issue, Reduce) and issue.unit in copied_of:
            yield copied_of[issue.unit](issue)
    for name in copied_of:
        # What the device steps of states that stay; `bucket_moves` has the others.
        yield 0, 4 * plan.sharding.offload.resident(name, padded[name] // shards[name].degrees.optimizer)


def _reduced(plan: Plan, placement: Placement, padded: int) -> Callable[[Reduce], Copied]:
    """Return a function that returns what one reduction of a unit copies. Sums over ranks are fp32."""
    degrees = placement.degrees
    summed, owned = padded // degrees.gradients, padded // degrees.optimizer
    each = summed * (4 if degrees.gradients > 1 else plan.buffered_gradient_bytes), 0
    last = (owned * placement.wire_bytes(plan.compute_bytes), 4 * summed) if placement.hops_after_sum else each
    return lambda issue: (last[0], 0) if issue.last and issue.first else last if issue.last else each
