"""The optimizer states of one unit on this rank, of which a part rests outside of the memory that computes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from llmtrain_kernels.adamw.step import AdamWStep
from torch import Tensor

from llmtrain.offload.staging import Staging
from llmtrain.offload.tiers import StateTier
from llmtrain.plan.offload import Bucket
from llmtrain.sharding.optimizer_shard import STATES, OptimizerShard, Range, StepRule


@dataclass(frozen=True)
class TierBuckets:
    """The buckets of one unit in a tier. staging: how they move. first: number of the first of them."""

    tier: StateTier
    staging: Staging
    first: int
    buckets: Sequence[Bucket]


class OffloadedShard:
    """Optimizer states as `OptimizerShard` has them: those of the first elements beside the weights, the others in
    buckets of a tier, where the CPU steps them.

    resident: the states that stay. rule: how the buckets are stepped. masters: the masters of all elements, if they are
    the weights themselves; else None, and the tier has those of its buckets.
    """

    def __init__(self, resident: OptimizerShard, outside: TierBuckets, rule: StepRule, masters: Tensor | None) -> None:
        start = resident.held[0]
        self.held = (start, start + outside.buckets[-1].end)
        self._resident, self._outside, self._rule, self._masters = resident, outside, rule, masters
        self._names = STATES if masters is None else STATES[1:]

    def step(self, within: Range, gradient: Tensor, numbers: AdamWStep, weight: Tensor | None = None) -> None:
        """See `OptimizerShard.step`. within: of all elements, or a range of a step that passes through all in order."""
        for start, end in _common(self._resident.held, within):
            own = slice(start - within[0], end - within[0])
            self._resident.step((start, end), gradient[own], numbers, None if weight is None else weight[own])
        self._step_outside(within, gradient, numbers, weight)

    def read(self, name: str, start: int, end: int) -> Tensor:
        """See `OptimizerShard.read`; the copy is the caller's where states rest in files."""
        if name == "master" and self._masters is not None:
            return self._masters[start - self.held[0] : end - self.held[0]]
        found = [self._resident.read(name, *part) for part in _common(self._resident.held, (start, end))]
        state = self._names.index(name)
        found += [self._outside.tier.read(number, state, *part) for number, part, _ in self._parts(start, end)]
        return found[0] if len(found) == 1 else torch.cat([torch.empty(0), *(one.cpu() for one in found)])

    def write(self, name: str, start: int, values: Tensor) -> None:
        """See `OptimizerShard.write`."""
        end = start + values.numel()
        if name == "master" and self._masters is not None:
            self._masters[start - self.held[0] : end - self.held[0]].copy_(values)
            return
        for first, last in _common(self._resident.held, (start, end)):
            self._resident.write(name, first, values[first - start : last - start])
        for number, part, own in self._parts(start, end):
            self._outside.tier.write(number, self._names.index(name), part[0], values[own])

    def use_masters(self, masters: Tensor) -> None:
        """See `OptimizerShard.use_masters`."""
        self._masters = masters
        self._resident.use_masters(masters[: self._resident.held[1] - self.held[0]])

    @property
    def nbytes(self) -> int:
        """Bytes of the states beside the weights, and of masters that are weights."""
        held = 0 if self._masters is None else self._masters[self._resident.held[1] - self.held[0] :].nbytes
        return self._resident.nbytes + held

    @property
    def read_late(self) -> bool:
        """Whether a checkpoint reads the states while it is written, and copies none before."""
        return True

    def _step_outside(self, within: Range, gradient: Tensor, numbers: AdamWStep, weight: Tensor | None) -> None:
        outside, tier, staging = self._outside, self._outside.tier, self._outside.staging
        parts = list(self._parts(*within))
        if not parts:
            return
        staging.begin(gradient, weight, [own for _, _, own in parts])
        for place, (number, (first, last), own) in enumerate(parts):
            bucket = outside.buckets[number - outside.first]
            held = tier.take(number)[:, first:last]
            states = dict(zip(self._names, held.unbind(), strict=True))
            start, end = within[0] + own.start, within[0] + own.stop
            if self._masters is not None:
                states["master"] = self._masters[start - self.held[0] : end - self.held[0]]
            came, goes = staging.take(place)
            self._rule.step(states, (start, end), came, numbers, goes)
            staging.put(place)
            # A bucket of which only a part was stepped is taken again.
            if last == bucket.end - bucket.start:
                tier.put(number)
        staging.end()

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, Range, slice]]:
        """Yield each bucket's part of `[start, end)`: its number, the part from the bucket's first element, and the
        part from `start`."""
        for number, bucket in enumerate(self._outside.buckets, self._outside.first):
            origin = self.held[0] + bucket.start
            for first, last in _common((origin, self.held[0] + bucket.end), (start, end)):
                yield number, (first - origin, last - origin), slice(first - start, last - start)


def _common(one: Range, other: Range) -> list[Range]:
    """Return what two ranges have in common: one range, or none."""
    start, end = max(one[0], other[0]), min(one[1], other[1])
    return [(start, end)] if start < end else []
