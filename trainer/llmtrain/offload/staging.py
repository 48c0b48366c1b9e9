"""How one bucket of offloaded states is stepped: where the kernel runs, and what is copied there and back."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from llmtrain_kernels.adamw.step import AdamWStep
from torch import Tensor

from llmtrain.comm.device import in_host_memory
from llmtrain.comm.pinned_memory import host_zeros
from llmtrain.comm.waits import Done, Event
from llmtrain.offload.copies import Copies, copies_to
from llmtrain.offload.usage import LinkCount
from llmtrain.plan.offload import Offload
from llmtrain.sharding.optimizer_shard import ElementRange, StepRule


@dataclass(frozen=True, eq=False, kw_only=True)
class BucketStep:
    """A bucket, or a part of one, to be stepped. bucket: its number. part: the range of its elements; parts of a bucket
    come in order. last: whether no other part comes. within: the range in the unit. rule: how the unit is stepped.

    gradient: `[n]`, fp32 or of the compute dtype, on the device. weight: `[n]` of the compute dtype, on the device or
    where it rests in the host's memory: it receives the rounded masters, or is the masters. computed: when the device
    has computed the gradient, and no longer uses what was in the memory of the weight before.
    """

    bucket: int
    part: slice
    last: bool
    within: ElementRange
    rule: StepRule
    gradient: Tensor
    weight: Tensor
    computed: Event


@dataclass(frozen=True, eq=False)
class StepAhead:
    """A whole bucket to be stepped ahead. spare: memory of the host or of the device, `[n]` of the compute dtype, which
    receives the new weights until they are published."""

    work: BucketStep
    spare: Tensor


class Staging(Protocol):
    """Steps one bucket at a time, with buffers of its own. When a step returns, the states are new and the gradient is
    no longer needed."""

    def step(self, work: BucketStep, states: Tensor, numbers: AdamWStep) -> Event:
        """Step a bucket in place. states: fp32 `[states, n]` in the host's memory. Return when the weights are where
        `work` has them."""

    def step_ahead(self, ahead: StepAhead, old: Tensor, new: Tensor, apart: bool, numbers: AdamWStep) -> None:
        """Step a bucket into `new` and the spare memory. old, new: fp32 `[states, n]` in the host's memory. apart:
        whether they are different memory."""

    def publish(self, ahead: StepAhead) -> Event:
        """Copy the weights of a step ahead from the spare memory. Return when they are where its work has them."""

    @property
    def nbytes(self) -> int:
        """Bytes of the device's memory."""

    @property
    def link(self) -> LinkCount:
        """What was copied between the host and the device."""


class InPlace:
    """A CPU computes and steps: nothing moves. threads: number of threads of the kernel."""

    nbytes = 0

    def __init__(self, threads: int = 1) -> None:
        self._threads, self.link = threads, LinkCount()

    def step(self, work: BucketStep, states: Tensor, numbers: AdamWStep) -> Event:
        """See Staging."""
        _step(work, states, work.gradient, numbers, work.weight, self._threads)
        return Done()

    def step_ahead(self, ahead: StepAhead, old: Tensor, new: Tensor, apart: bool, numbers: AdamWStep) -> None:
        """See Staging."""
        work = ahead.work
        # The norm is of the gradients as they are, and a step ahead that is discarded is done again.
        gradient = work.gradient.clone() if work.rule.changes_gradient else work.gradient
        _step_ahead(ahead, old, new, apart, gradient, numbers, self._threads)

    def publish(self, ahead: StepAhead) -> Event:
        """See Staging."""
        ahead.work.weight.copy_(ahead.spare)
        return Done()


class _Copying:
    """The part of a staging that publishes through copies. on_device: whether weights of steps ahead wait in the
    device's memory."""

    def __init__(self, copies: Copies, on_device: bool) -> None:
        self._copies, self._waits_on_device, self._published = copies, on_device, LinkCount()

    def publish(self, ahead: StepAhead) -> Event:
        """See Staging."""
        weight, spare = ahead.work.weight, ahead.spare
        self._published.to_device += 0 if self._waits_on_device or in_host_memory(weight) else spare.nbytes
        return self._copies.publish(weight, spare, ahead.work.computed)

    @property
    def link(self) -> LinkCount:
        """See Staging."""
        return self._copies.link + self._published


class Pinned(_Copying):
    """A GPU computes and the CPU steps (ZeRO-Offload, section 4): the gradient comes to a pinned slot, and the weight
    goes back from one."""

    nbytes = 0

    def __init__(
        self, copies: Copies, bucket: int, dtype: torch.dtype, sums: torch.dtype, threads: int = 1,
        on_device: bool = False,
    ) -> None:  # fmt: skip
        """bucket: most elements of a bucket. dtype, sums: dtypes of the weights and of the sums of gradients. threads:
        number of threads of the kernel. on_device: see _Copying."""
        super().__init__(copies, on_device)
        self._threads = threads
        self._gradient, self._weight = (host_zeros(bucket, one, pinned=True) for one in (sums, dtype))

    def step(self, work: BucketStep, states: Tensor, numbers: AdamWStep) -> Event:
        """See Staging."""
        gradient, weight = self._bring(work), self._weight[: work.gradient.numel()]
        if in_host_memory(work.weight):
            _step(work, states, gradient, numbers, work.weight, self._threads)
            return Done()
        _step(work, states, gradient, numbers, weight, self._threads)
        self._take_up(weight, work.weight)
        return self._copies.record()

    def step_ahead(self, ahead: StepAhead, old: Tensor, new: Tensor, apart: bool, numbers: AdamWStep) -> None:
        """See Staging."""
        gradient, weight = self._bring(ahead.work), self._weight[: ahead.work.gradient.numel()]
        if not self._waits_on_device:
            _step_ahead(ahead, old, new, apart, gradient, numbers, self._threads)
            return
        _step_ahead(replace(ahead, spare=weight), old, new, apart, gradient, numbers, self._threads)
        self._take_up(weight, ahead.spare)
        self._copies.wait()

    def _take_up(self, weight: Tensor, to: Tensor) -> None:
        """Start to copy a weight from its slot."""
        with self._copies.after(Done()):
            to.copy_(weight, non_blocking=True)
        self._copies.count(to_host=0, to_device=weight.nbytes)

    def _bring(self, work: BucketStep) -> Tensor:
        """Return the gradient in its slot."""
        gradient = self._gradient[: work.gradient.numel()]
        with self._copies.after(work.computed):
            gradient.copy_(work.gradient, non_blocking=True)
        self._copies.count(to_host=0 if in_host_memory(work.gradient) else gradient.nbytes, to_device=0)
        # The weight of the bucket before has left its slot after this, too.
        self._copies.wait()
        return gradient


class OnDevice(_Copying):
    """The device steps (AxoNN, section V): states come to a slot of its memory and go back. A step ahead takes a copy
    of the gradient too, as kernels may change it."""

    def __init__(self, copies: Copies, slot: Tensor, ahead: Tensor, weight: Tensor, on_device: bool = False) -> None:
        """slot: fp32 `[states, most elements of a bucket]`. ahead, weight: memory for the gradient and for the
        weights of a step ahead; `[0]` if no bucket is stepped ahead, and `weight` if its weights wait on the device.
        on_device: see _Copying."""
        super().__init__(copies, on_device)
        self._slot, self._ahead, self._weight = slot, ahead, weight
        self.nbytes = sum(one.nbytes for one in (slot, ahead, weight))

    def step(self, work: BucketStep, states: Tensor, numbers: AdamWStep) -> Event:
        """See Staging."""
        slot = self._slot[: len(states), : states.shape[1]]
        with self._copies.after(work.computed):
            _copy_states(states, slot)
            _step(work, slot, work.gradient, numbers, work.weight, 1)
            _copy_states(slot, states)
        self._copies.count(to_host=states.nbytes, to_device=states.nbytes)
        self._copies.wait()
        return Done()

    def step_ahead(self, ahead: StepAhead, old: Tensor, new: Tensor, apart: bool, numbers: AdamWStep) -> None:
        """See Staging."""
        work, size = ahead.work, old.shape[1]
        slot, gradient = self._slot[: len(old), :size], self._ahead[:size]
        weight = ahead.spare if self._waits_on_device else self._weight[:size]
        with self._copies.after(work.computed):
            _copy_states(old, slot)
            gradient.copy_(work.gradient)
            if work.rule.masters.in_weights:
                weight.copy_(work.weight)
            _step(work, slot, gradient, numbers, weight, 1)
            _copy_states(slot, new)
            if weight is not ahead.spare:
                ahead.spare.copy_(weight, non_blocking=True)
        weights = 0 if weight is ahead.spare else weight.nbytes
        self._copies.count(to_host=new.nbytes + weights, to_device=old.nbytes)
        self._copies.wait()


def stagings(
    offload: Offload, device: torch.device, bucket: int, dtype: torch.dtype, sums: torch.dtype, states: int
) -> list[Staging]:
    """Return one staging for each thread that steps. device: what computes. bucket: most elements of one. dtype, sums:
    dtypes of the weights and of the sums of gradients. states: number of states of a bucket. torch's threads are shared
    out over kernels that run at the same time."""
    threads = max(1, torch.get_num_threads() // offload.workers)
    waits_on_device = offload.spare_weights == "device"

    def new() -> Staging:
        if offload.on_device:
            copies, slot = copies_to(device), torch.zeros(states, bucket, device=device)
            gradient = torch.zeros(bucket if offload.spare else 0, dtype=sums, device=device)
            weight = torch.zeros(0 if waits_on_device else len(gradient), dtype=dtype, device=device)
            return OnDevice(copies, slot, gradient, weight, waits_on_device)
        if device.type == "cpu":
            return InPlace(threads)
        return Pinned(copies_to(device), bucket, dtype, sums, threads, waits_on_device)

    return [new() for _ in range(offload.workers)]


def _copy_states(source: Tensor, target: Tensor) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one, non_blocking=True)


def _step(work: BucketStep, states: Tensor, gradient: Tensor, numbers: AdamWStep, weight: Tensor, threads: int) -> None:
    """Step in place. weight: what receives the new weights, or has the masters."""
    rule = work.rule
    rule.step(rule.masters.by_name(states, weight), work.within, gradient, numbers, weight, None, threads)


def _step_ahead(
    ahead: StepAhead, old: Tensor, new: Tensor, apart: bool, gradient: Tensor, numbers: AdamWStep, threads: int
) -> None:
    """Step from `old` to `new`, and to the spare memory. See Staging."""
    work, masters, spare = ahead.work, ahead.work.rule.masters, ahead.spare
    # Where all new states are in the memory of the old ones, the kernel steps in place.
    into = masters.by_name(new, spare) if apart or masters.in_weights else None
    work.rule.step(masters.by_name(old, work.weight), work.within, gradient, numbers, spare, into, threads)
