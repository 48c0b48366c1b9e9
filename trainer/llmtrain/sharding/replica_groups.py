"""Ranks beyond the data-parallel ones that hold the same parameters, and the sums that keep those equal."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmtrain.comm.activity import Activity
from llmtrain.comm.collectives import Collectives
from llmtrain.sharding.unit import ShardedUnit


@dataclass(frozen=True)
class ReplicaGroups:
    """Groups of ranks that hold the same parameters.

    copies: number of tensor-parallel ranks; all of them hold the TP-replicated parameters of each unit. partial: those
    ranks, if each has only a part of the gradients of TP-replicated parameters (sequence parallelism). stage: all ranks
    of this pipeline stage, if their gradients of TP-replicated parameters may differ (see `Plan.averages_replicas`).
    tied: by unit, the ranks of two pipeline stages that both compute with it.
    second: units whose first copy belongs to an earlier stage. activity: records the time spent waiting.
    """

    copies: int = 1
    partial: Collectives | None = None
    stage: Collectives | None = None
    tied: Mapping[str, Collectives] = field(default_factory=dict)
    second: frozenset[str] = frozenset()
    activity: Activity = field(default_factory=Activity)

    def sum_partial(self, unit: ShardedUnit, gradient: Tensor) -> None:
        """Sum the tensor-parallel ranks' parts of the gradients of TP-replicated parameters. gradient: of the full
        unit, `[padded]` of its dtype; changed in place."""
        part = gradient[unit.spec.replicated_from : unit.spec.numel]
        if self.partial is not None and len(part):
            self.activity.wait(self.partial.all_reduce(part).wait)

    def finish(self, units: Mapping[str, ShardedUnit]) -> None:
        """Make the summed gradients of replicas equal. Collective over the groups."""
        if self.stage is not None:
            self._average_replicated(self.stage, units.values())
        for name, group in self.tied.items():
            self.activity.wait(group.all_reduce(units[name].owned_gradient).wait)

    def shares(self, name: str, unit: ShardedUnit) -> list[tuple[int, int, float]]:
        """Return the ranges of this rank's optimizer shard, each with the share of its squares that this rank adds to
        the squared norm of the model."""
        start, end = unit.ranges.optimizer
        middle = start + unit.own(unit.spec.replicated_from)
        if name in self.second:
            return []
        if self.copies == 1:
            return [(start, end, 1.0)]
        return [(start, middle, 1.0), (middle, end, 1 / self.copies)]

    def close(self) -> None:
        """Leave the process groups."""
        for group in self._groups:
            group.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the groups' buffers."""
        return sum(group.nbytes for group in self._groups)

    @property
    def _groups(self) -> list[Collectives]:
        return [group for group in (self.partial, self.stage, *self.tied.values()) if group is not None]

    def _average_replicated(self, stage: Collectives, units: Collection[ShardedUnit]) -> None:
        """Replace the gradients of TP-replicated parameters by their mean over the stage's ranks."""
        sizes = [unit.spec.replicated_numel for unit in units]
        every = torch.zeros(sum(sizes), device=next(iter(units)).gradient.device)
        averaged: list[tuple[Tensor, Tensor, float]] = []
        for unit, values in zip(units, every.split(sizes), strict=True):
            start, end = (max(offset - unit.spec.replicated_from, 0) for offset in unit.ranges.optimizer)
            offset, part = unit.own(unit.spec.replicated_from), values[start:end]
            holders = unit.degrees.ranks // unit.degrees.optimizer * self.copies
            averaged.append((unit.owned_gradient[offset : offset + len(part)], part, 1 / holders))
        for own, part, _ in averaged:
            part.copy_(own)
        self.activity.wait(stage.all_reduce(every).wait)
        for own, part, share in averaged:
            own.copy_(part.mul_(share))
