"""The collectives and messages of an evaluation, from the plan of a rank."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from llmtrain.cluster.layout import Axis
from llmtrain.plan.per_rank.rank_activations import boundary_bytes
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.tensor_calls import TensorCalls
from llmtrain.plan.program.transfers import lane_members, unit_traffic

Planned = tuple[str, str, tuple[int, ...], int]
"""Purpose, operation, ranks of the group, or the receiver of a message, and bytes of the whole tensor."""


def evaluation_calls(plan: Plan, rank: int, programs: Programs, parts: Sequence[Sequence[int]]) -> Iterator[Planned]:
    """Yield the calls of an evaluation. parts: sequences of each microbatch, of each part of the evaluation."""
    together = plan.pipeline.schedule.evaluated_together
    for part in parts:
        groups = [len(part[first : first + together]) for first in range(0, len(part), together)]
        yield from _gathers(plan, rank, programs, groups)
        for sequences in part:
            batch = replace(plan.batch, microbatch=sequences)
            yield from _passes(replace(plan, batch=batch), rank)
    if plan.grid.world > 1:
        # Whether a rank was asked to stop: before each part, and at the end; then the loss.
        everyone = tuple(range(plan.grid.world))
        yield from [("scalars", "all_reduce", everyone, 3 * 8)] * (len(parts) + 1)
        yield "scalars", "all_reduce", everyone, 8


def _gathers(plan: Plan, rank: int, programs: Programs, groups: Sequence[int]) -> Iterator[Planned]:
    units = {unit.spec.name: unit for unit in unit_traffic(plan, rank)}
    for issue in programs.evaluation(groups).issues:
        for transfer in units[issue.unit].of(issue):
            ranks = lane_members(plan.grid, rank, units[transfer.unit].placement, transfer.lane)
            yield transfer.traffic.purpose, transfer.traffic.op, ranks, transfer.traffic.size


def _passes(plan: Plan, rank: int) -> Iterator[Planned]:
    """Yield what the forward passes of one microbatch send."""
    calls, schedule = TensorCalls(plan), plan.pipeline.schedule
    tensor, line = tuple(plan.grid.group_of(rank, Axis.TENSOR)), plan.grid.group_of(rank, Axis.PIPELINE)
    for layout in plan.stages_of(rank):
        if len(tensor) > 1:
            found = [*calls.forward(layout), *(calls.loss(trains=False) if layout.closes else ())]
            yield from (("tensor", op, tensor, size) for op, size in found)
        if not layout.closes:
            receiver = line[schedule.rank_and_chunk(layout.stage + 1)[0]]
            if receiver != rank:
                yield "pipeline", "send", (receiver,), boundary_bytes(plan)
