"""How one bucket of offloaded states is stepped: where the kernel runs, and what is copied there and back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from llmtrain_kernels.adamw.step import AdamWStep
from torch import Tensor

from llmtrain.comm.device import in_host_memory
from llmtrain.comm.pinned_memory import host_zeros
from llmtrain.offload.usage import LinkCount
from llmtrain.plan.offload import Offload
from llmtrain.sharding.optimizer_shard import STATES, Range, StepRule

CopyEvent = torch.cuda.Event | None


@dataclass(frozen=True, eq=False, kw_only=True)
class BucketStep:
    """A bucket, or a part of one, to be stepped. bucket: its number. part: the range of its elements; parts of a bucket
    come in order. last: whether no other part comes. within: the range in the unit. rule: how the unit is stepped.

    gradient: `[n]`, fp32 or of the compute dtype, on the device. weight: `[n]` of the compute dtype, which receives the
    rounded masters, on the device or where it rests in the host's memory; None if the masters are the weights. masters:
    fp32 `[n]`, if they are the weights; else None. spare: memory of the host for what a step ahead writes to `weight`,
    or to `masters`. computed: when the device has computed the gradient, and no longer uses what was in the memory of
    the weight before; None on a CPU.
    """

    bucket: int
    part: slice
    last: bool
    within: Range
    rule: StepRule
    gradient: Tensor
    weight: Tensor | None
    masters: Tensor | None
    spare: Tensor | None
    computed: CopyEvent

    @property
    def names(self) -> tuple[str, ...]:
        """The states that are offloaded."""
        return STATES if self.masters is None else STATES[1:]

    @property
    def result(self) -> Tensor:
        """The weights with which the model computes, `[n]`: rounded ones in the compute dtype, or the fp32 masters."""
        found = self.weight if self.masters is None else self.masters
        assert found is not None
        return found


class Staging(Protocol):
    """Steps one bucket at a time, with buffers of its own."""

    def step(self, work: BucketStep, old: Tensor, new: Tensor, numbers: AdamWStep, ahead: bool) -> CopyEvent:
        """Step a bucket. old, new: fp32 `[states, n]` in the host's memory; may be the same. ahead: the weights go to
        `work.spare`. When it returns, `new` has the states and the gradient is no longer needed.

        Return when the device has the weights; None if it has them already, or does not get them.
        """

    def publish(self, work: BucketStep) -> CopyEvent:
        """Bring the weights of a step ahead to the device. Return when it has them; None if it has them already."""

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

    def step(self, work: BucketStep, old: Tensor, new: Tensor, numbers: AdamWStep, ahead: bool) -> CopyEvent:
        """See Staging."""
        weight = work.spare if ahead else work.weight
        before, into = _by_name(work, old, work.masters), _by_name(work, new, work.spare if ahead else work.masters)
        # The norm is of the gradients as they are, and a step ahead that is discarded is done again.
        gradient = work.gradient.clone() if ahead and work.rule.changes_gradient else work.gradient
        _step(work, before, gradient, numbers, weight, into, self._threads)
        return None

    def publish(self, work: BucketStep) -> CopyEvent:
        """See Staging."""
        assert work.spare is not None
        work.result.copy_(work.spare)
        return None


class Copies:
    """Copies between the host and a device: on a CUDA stream of their own, or immediately."""

    def __init__(self, device: torch.device) -> None:
        self.link = LinkCount()
        self._stream = None if device.type == "cpu" else torch.cuda.Stream(device)
        # Published weights have a stream of their own, so that the next gradients do not wait for them.
        self._publishing = None if device.type == "cpu" else torch.cuda.Stream(device)

    @contextmanager
    def after(self, event: CopyEvent) -> Iterator[None]:
        """Queue what is computed inside behind an event."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if event is not None:
                self._stream.wait_event(event)
            yield

    def publish(self, to: Tensor, values: Tensor, after: CopyEvent) -> CopyEvent:
        """Copy weights, `[n]` of the compute dtype, after an event. Return the event of their arrival; None if they
        have arrived."""
        if self._publishing is None or in_host_memory(to):
            to.copy_(values)
            return None
        self.link.to_device += values.nbytes
        with torch.cuda.stream(self._publishing):
            if after is not None:
                self._publishing.wait_event(after)
            to.copy_(values, non_blocking=True)
        return self._publishing.record_event()

    def count(self, to_host: int, to_device: int) -> None:
        """Count bytes that were copied between the host and a GPU."""
        if self._stream is not None:
            self.link.to_host += to_host
            self.link.to_device += to_device

    def wait(self) -> None:
        """Let the host wait for all copies but those of `publish`."""
        if self._stream is not None:
            self._stream.synchronize()

    def record(self) -> CopyEvent:
        """Return an event behind the same copies; None if there are none under way."""
        return None if self._stream is None else self._stream.record_event()


class Pinned:
    """A GPU computes and the CPU steps (ZeRO-Offload, section 4): the gradient comes to a pinned slot, and the weight
    goes back from one."""

    nbytes = 0

    def __init__(self, copies: Copies, bucket: int, dtype: torch.dtype, sums: torch.dtype, threads: int = 1) -> None:
        """bucket: most elements of a bucket. dtype, sums: dtypes of the weights and of the sums of gradients. threads:
        number of threads of the kernel."""
        self._copies, self._threads, self.link = copies, threads, copies.link
        self._gradient, self._weight = (host_zeros(bucket, one, pinned=True) for one in (sums, dtype))

    def step(self, work: BucketStep, old: Tensor, new: Tensor, numbers: AdamWStep, ahead: bool) -> CopyEvent:
        """See Staging."""
        assert work.weight is not None
        size = work.gradient.numel()
        gradient, weight = self._gradient[:size], self._weight[:size]
        with self._copies.after(work.computed):
            gradient.copy_(work.gradient, non_blocking=True)
        self.link.to_host += 0 if in_host_memory(work.gradient) else gradient.nbytes
        # The weight of the bucket before has left its slot after this, too.
        self._copies.wait()
        at_rest = in_host_memory(work.weight)
        written = work.spare if ahead else work.weight if at_rest else weight
        states, into = _by_name(work, old, None), _by_name(work, new, None)
        _step(work, states, gradient, numbers, written, into, self._threads)
        if ahead or at_rest:
            return None
        with self._copies.after(None):
            work.weight.copy_(weight, non_blocking=True)
        self.link.to_device += weight.nbytes
        return self._copies.record()

    def publish(self, work: BucketStep) -> CopyEvent:
        """See Staging."""
        assert work.spare is not None
        return self._copies.publish(work.result, work.spare, work.computed)


class OnDevice:
    """The device steps (AxoNN, section V): states come to a slot of its memory and go back. A step ahead takes a copy
    of the gradient too, as kernels may change it."""

    def __init__(self, copies: Copies, slot: Tensor, ahead: Tensor | None, weight: Tensor | None) -> None:
        """slot: fp32 `[states, most elements of a bucket]`. ahead, weight: memory for the gradient and for the
        weights of a step ahead; None if no bucket is stepped ahead."""
        self._copies, self._slot, self._ahead, self._weight = copies, slot, ahead, weight
        self.link = copies.link
        self.nbytes = sum(one.nbytes for one in (slot, ahead, weight) if one is not None)

    def step(self, work: BucketStep, old: Tensor, new: Tensor, numbers: AdamWStep, ahead: bool) -> CopyEvent:
        """See Staging."""
        size = work.gradient.numel()
        slot, gradient, weight = self._slot[: len(old), :size], work.gradient, work.weight
        masters = work.masters
        with self._copies.after(work.computed):
            for inside, outside in zip(slot, old, strict=True):
                inside.copy_(outside, non_blocking=True)
            if ahead:
                assert self._ahead is not None
                assert self._weight is not None
                gradient, stepped = self._ahead[:size].copy_(gradient), self._weight[:size]
                weight = stepped if masters is None else None
                masters = None if masters is None else stepped.copy_(masters)
            states = _by_name(work, slot, masters)
            _step(work, states, gradient, numbers, weight, states, 1)
            for inside, outside in zip(slot, new, strict=True):
                outside.copy_(inside, non_blocking=True)
            if ahead:
                assert work.spare is not None
                work.spare.copy_(stepped, non_blocking=True)
        self._copies.count(to_host=new.nbytes + (stepped.nbytes if ahead else 0), to_device=old.nbytes)
        self._copies.wait()
        return None

    def publish(self, work: BucketStep) -> CopyEvent:
        """See Staging."""
        assert work.spare is not None
        return self._copies.publish(work.result, work.spare, work.computed)


def stagings(
    offload: Offload, device: torch.device, bucket: int, dtype: torch.dtype, sums: torch.dtype, states: int
) -> list[Staging]:
    """Return one staging for each thread that steps. device: what computes. bucket: most elements of one. dtype, sums:
    dtypes of the weights and of the sums of gradients. states: number of states of a bucket. torch's threads are shared
    out over kernels that run at the same time."""
    threads = max(1, torch.get_num_threads() // offload.workers)
    if offload.on_device:
        return [_on_device(offload, device, bucket, dtype, sums, states) for _ in range(offload.workers)]
    if device.type == "cpu":
        return [InPlace(threads) for _ in range(offload.workers)]
    return [Pinned(Copies(device), bucket, dtype, sums, threads) for _ in range(offload.workers)]


def _on_device(
    offload: Offload, device: torch.device, bucket: int, dtype: torch.dtype, sums: torch.dtype, states: int
) -> OnDevice:
    slot, copies = torch.zeros(states, bucket, device=device), Copies(device)
    if not offload.spare:
        return OnDevice(copies, slot, None, None)
    gradient, weight = (torch.zeros(bucket, dtype=one, device=device) for one in (sums, dtype))
    return OnDevice(copies, slot, gradient, weight)


def _by_name(work: BucketStep, states: Tensor, masters: Tensor | None) -> dict[str, Tensor]:
    """Return all states of a bucket by name. masters: those that rest with the weights; None if `states` has them."""
    found = dict(zip(work.names, states.unbind(), strict=True))
    return found if work.masters is None or masters is None else {"master": masters, **found}


def _step(
    work: BucketStep, states: Mapping[str, Tensor], gradient: Tensor, numbers: AdamWStep, weight: Tensor | None,
    into: Mapping[str, Tensor], threads: int,
) -> None:  # fmt: skip
    weight = weight if work.masters is None else None
    # A kernel that finds the new states where the old ones are steps in place.
    apart = any(into[name].data_ptr() != states[name].data_ptr() for name in STATES)
    work.rule.step(states, work.within, gradient, numbers, weight, into if apart else None, threads)
