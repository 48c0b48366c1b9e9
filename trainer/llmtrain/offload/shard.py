"""The optimizer states of one unit on this rank, of which a part rests outside of the memory that computes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from llmtrain_kernels.adamw.step import AdamWStep
from torch import Tensor

from llmtrain.comm.device import to_host
from llmtrain.offload.copies import recorded
from llmtrain.offload.staging import BucketStep, StepAhead
from llmtrain.offload.stepper import Stepper, StepTicket
from llmtrain.plan.offload import PARTS, Bucket
from llmtrain.sharding.optimizer_shard import ElementRange, OptimizerShard, StepRule


@dataclass(frozen=True)
class OffloadedBuckets:
    """The buckets of one unit. stepper: steps them, and knows where their states are. first: number of the first of
    them. spare: by number of each bucket that is stepped ahead, memory for the weights. at_rest: the unit's weight
    shard in the host's memory, if steps write it there; None if they write the `weight` that they get."""

    stepper: Stepper
    first: int
    buckets: Sequence[Bucket]
    spare: Mapping[int, Tensor]
    at_rest: Tensor | None = None


class OffloadedShard:
    """Optimizer states with the interface of `OptimizerShard`: the first elements are resident in the memory that
    computes, the others are in offloaded buckets, which threads step.

    resident: the states that stay. rule: how the buckets are stepped. in_weights: states of all elements that are the
    weights themselves, fp32 `[n]` by name: the masters, or none.
    """

    def __init__(
        self, resident: OptimizerShard, offloaded: OffloadedBuckets, rule: StepRule, in_weights: Mapping[str, Tensor]
    ) -> None:
        start = resident.bounds[0]
        self.bounds = (start, start + offloaded.buckets[-1].end)
        self._resident, self._offloaded, self._rule, self._in_weights = resident, offloaded, rule, in_weights
        # The ticket of the newest range. A step in ranges is done by one thread in order, so the earlier ranges are
        # done before it.
        self._stepped: StepTicket | None = None

    def step_ahead(self, gradient: Tensor, weight: Tensor) -> None:
        """See `OptimizerStates.step_ahead`."""
        spare = self._offloaded.spare
        works = [work for work in self._works(self.bounds, gradient, weight) if work.bucket in spare]
        self._offloaded.stepper.step_ahead([StepAhead(work, spare[work.bucket]) for work in works])

    def step(self, within: ElementRange, gradient: Tensor, numbers: AdamWStep, weight: Tensor) -> StepTicket:
        """See `OptimizerStates.step`. within: all elements, or a range of a step that passes through all in order."""
        self._stepped = ticket = self._offloaded.stepper.step(self._works(within, gradient, weight), numbers)
        for start, end in _common(self._resident.bounds, within):
            own = slice(start - within[0], end - within[0])
            self._resident.step((start, end), gradient[own], numbers, weight[own])
        return ticket

    def read(self, name: str, start: int, end: int) -> Tensor:
        """See `OptimizerShard.read`; the copy is the caller's where states rest in files."""
        if self._stepped is not None:
            # Other units may still be stepped: their buckets, in which this reads nothing, are not waited for.
            self._stepped.wait()
        if name in self._in_weights:
            return self._in_weights[name][start - self.bounds[0] : end - self.bounds[0]]
        values, done = torch.empty(end - start), 0
        # Not all parts at the same time: a checkpoint has no memory for all of them twice.
        for read in _started(self._reads(name, start, end), PARTS):
            part = read()
            self._offloaded.stepper.moving()
            if part.numel() == end - start:
                return part
            values[done : done + part.numel()].copy_(to_host(part))
            done += part.numel()
            # The next part takes their memory.
            del part, read
        return values

    def _reads(self, name: str, start: int, end: int) -> Iterator[Callable[[], Tensor]]:
        """Yield what returns the values of each part of a range, in order. Parts in files are read from then on."""
        for part in _common(self._resident.bounds, (start, end)):
            yield partial(self._resident.read, name, *part)
        states, state = self._offloaded.stepper.states, self._rule.masters.names.index(name)
        for number, part, _ in self._parts(start, end):
            yield states.start_read(number, state, *part)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """See `OptimizerShard.write`."""
        end = start + values.numel()
        self._offloaded.stepper.finish()
        if name in self._in_weights:
            self._in_weights[name][start - self.bounds[0] : end - self.bounds[0]].copy_(values)
            return
        for first, last in _common(self._resident.bounds, (start, end)):
            self._resident.write(name, first, values[first - start : last - start])
        for number, part, own in self._parts(start, end):
            self._offloaded.stepper.states.write(number, self._rule.masters.names.index(name), part[0], values[own])
            self._offloaded.stepper.moving()

    def use_masters(self, masters: Tensor) -> None:
        """See `OptimizerShard.use_masters`."""
        self._in_weights = {"master": masters}
        self._resident.use_masters(masters[: self._resident.bounds[1] - self.bounds[0]])

    @property
    def nbytes(self) -> int:
        """Bytes of the resident states, and of masters that are weights."""
        offloaded = slice(self._resident.bounds[1] - self.bounds[0], None)
        return self._resident.nbytes + sum(state[offloaded].nbytes for state in self._in_weights.values())

    @property
    def read_late(self) -> bool:
        """Whether a checkpoint reads the states while it is written, and copies none before."""
        return True

    def _works(self, within: ElementRange, gradient: Tensor, weight: Tensor) -> list[BucketStep]:
        computed = recorded(gradient.is_cuda or weight.is_cuda)
        if self._offloaded.at_rest is not None:
            weight = self._offloaded.at_rest[within[0] - self.bounds[0] : within[1] - self.bounds[0]]
        return [
            BucketStep(
                bucket=number,
                part=slice(*part),
                last=part[1] == self._offloaded.buckets[number - self._offloaded.first].numel,
                within=(within[0] + own.start, within[0] + own.stop),
                rule=self._rule,
                gradient=gradient[own],
                weight=weight[own],
                computed=computed,
            )
            for number, part, own in self._parts(*within)
        ]

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, ElementRange, slice]]:
        """Yield each bucket's part of `[start, end)`: its number, the part from the bucket's first element, and the
        part from `start`."""
        for number, bucket in enumerate(self._offloaded.buckets, self._offloaded.first):
            origin = self.bounds[0] + bucket.start
            for first, last in _common((origin, self.bounds[0] + bucket.end), (start, end)):
                yield number, (first - origin, last - origin), slice(first - start, last - start)


def _common(one: ElementRange, other: ElementRange) -> list[ElementRange]:
    """Return what two ranges have in common: one range, or none."""
    start, end = max(one[0], other[0]), min(one[1], other[1])
    return [(start, end)] if start < end else []


def _started(reads: Iterable[Callable[[], Tensor]], most: int) -> Iterator[Callable[[], Tensor]]:
    """Yield `reads` in order, each after the next ones have been taken out of it too, which starts them: at most `most`
    are on their way."""
    taken = deque[Callable[[], Tensor]]()
    for read in reads:
        taken.append(read)
        if len(taken) == most:
            yield taken.popleft()
    while taken:
        yield taken.popleft()
