"""Sums of gradients outside of the device, in buckets: in the host's memory, or in files."""

import operator
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from llmtrain_kernels.squared_sum.op import squared_blocks
from torch import Tensor

from llmtrain.comm.pinned_memory import host_zeros
from llmtrain.offload.gradient_tiers import GradientTier
from llmtrain.plan.offload import Bucket
from llmtrain.plan.program.gradient_buckets import UnitGradients
from llmtrain.sharding.optimizer_shard import ElementRange, StepRange


class _Squares:
    """The squared norms of ranges of one unit, from its buckets in order. Blocks' sums are added one after another, so
    that the bits are those of the sum over a whole range."""

    def __init__(self, ranges: Sequence[ElementRange]) -> None:
        self._blocks: dict[ElementRange, list[float]] = {within: [] for within in ranges}

    def take(self, start: int, values: Tensor) -> None:
        """Add the elements from `start` on, fp32."""
        for (first, last), blocks in self._blocks.items():
            begin, end = max(first, start), min(last, start + len(values))
            if begin < end:
                blocks += squared_blocks(values[begin - start : end - start], begin)

    def total(self, within: ElementRange) -> float:
        """Return the squared norm of a range."""
        return reduce(operator.add, self._blocks[within], 0.0)


class BucketedGradients:
    """Sums of gradients in the buckets of a tier. See GradientStore. It runs on the CPU."""

    def __init__(
        self, tier: GradientTier, units: Mapping[str, UnitGradients], ranges: Mapping[str, Sequence[ElementRange]],
        starts: Mapping[str, int], pinned: bool,
    ) -> None:  # fmt: skip
        """ranges: the ranges of each unit whose squared norms are asked for. starts: first element of each unit's
        gradient shard. pinned: whether gradients come from a GPU."""
        self._tier, self._units, self._ranges, self._starts = tier, units, ranges, starts
        largest = max(bucket.end - bucket.start for unit in units.values() for bucket in unit.buckets)
        self._came = host_zeros(largest if pinned else 0, torch.float32, pinned)
        self._squares: dict[str, _Squares] = {}

    def begin(self) -> None:
        """See GradientStore."""
        self._tier.begin()

    def add(self, unit: str, part: Tensor, first: bool, last: bool) -> None:
        """See GradientStore."""
        gradients = self._units[unit]
        if last:
            self._squares[unit] = _Squares(self._ranges[unit])
        for number, bucket, owned in zip(gradients.numbers, gradients.buckets, gradients.owned, strict=True):
            total = self._tier.take(number)
            own = self._to_host(part[bucket.start : bucket.end])
            if first:
                total.copy_(own)
            else:
                total.add_(own)
            if last and owned:
                self._squares[unit].take(self._starts[unit] + bucket.start, total)
            self._tier.put(number)

    def add_into(self, unit: str, part: Tensor, first: bool, total: Tensor) -> None:
        """See GradientStore."""
        gradients = self._units[unit]
        if first:
            total.copy_(part)
            return
        for number, bucket in zip(gradients.numbers, gradients.buckets, strict=True):
            own = slice(bucket.start, bucket.end)
            total[own].copy_(self._tier.take(number))
            self._tier.link.to_device += total[own].nbytes if len(self._came) else 0
            total[own].add_(part[own])
            self._tier.put(number)

    def put(self, unit: str, values: Tensor) -> None:
        """See GradientStore."""
        squares = self._squares[unit] = _Squares(self._ranges[unit])
        stepped = self._stepped(unit)
        offset = stepped[0][1].start
        for number, bucket in stepped:
            total = self._tier.take(number)
            total.copy_(self._to_host(values[bucket.start - offset : bucket.end - offset]))
            squares.take(self._starts[unit] + bucket.start, total)
            self._tier.put(number)

    def step(self, unit: str, step_range: StepRange) -> None:
        """See GradientStore."""
        start, stays = self._starts[unit], self._units[unit].resident
        for number, bucket in self._stepped(unit):
            here = min(stays, bucket.end - bucket.start)
            stays -= here
            # The bucket is on the host: AdamW copies the part that the device steps to the device.
            self._tier.link.to_device += 4 * here if len(self._came) else 0
            reader = step_range((start + bucket.start, start + bucket.end), self._tier.take(number))
            self._tier.put(number, copied=not (here and len(self._came)), reader=reader)

    def squares(self, unit: str, within: ElementRange) -> float:
        """See GradientStore."""
        return self._squares[unit].total(within)

    def _stepped(self, unit: str) -> list[tuple[int, Bucket]]:
        gradients = self._units[unit]
        return [(number, gradients.buckets[number - gradients.first]) for number in gradients.stepped]

    def _to_host(self, values: Tensor) -> Tensor:
        """Return values in the host's memory, valid until the next call."""
        if not len(self._came):
            return values
        came = self._came.view(values.dtype)[: len(values)]
        self._tier.link.to_host += came.nbytes
        return came.copy_(values)
