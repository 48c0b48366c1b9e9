"""The optimizer states of a rank that rest outside of its device, and the threads that step them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llmtrain.comm.pinned_memory import host_zeros
from llmtrain.comm.stalls import StreamStalls
from llmtrain.offload.shard import OffloadedBuckets, OffloadedShard
from llmtrain.offload.staging import stagings
from llmtrain.offload.states import FileStates, HostStates, StateStore
from llmtrain.offload.stepper import Stepper
from llmtrain.offload.usage import TierUsage
from llmtrain.plan.offload import Bucket, Offload, largest
from llmtrain.sharding.optimizer_shard import OptimizerShard
from llmtrain.sharding.unit import ShardedUnit


def open_states(
    offload: Offload, buckets: Sequence[Bucket], device: torch.device, dtype: torch.dtype, sums: torch.dtype
) -> "OffloadedStates | None":
    """Return a rank's offloaded states, without values; None if it offloads none. device: what computes. dtype, sums:
    dtypes of the weights and of the sums of gradients. Raises RunFailedError."""
    if not buckets:
        return None
    states: StateStore
    if offload.tier == "host":
        states = HostStates(buckets, pinned=device.type != "cpu")
    else:
        pinned = offload.on_device and device.type != "cpu"
        states = FileStates(buckets, offload.paths, offload.bandwidths, offload.overlap, pinned)
    return OffloadedStates(offload, buckets, states, device, dtype, sums)


class OffloadedStates:
    """The offloaded optimizer states of a rank: where they are, and what steps them. buckets: those of all units, in
    the order of `states`."""

    def __init__(
        self, offload: Offload, buckets: Sequence[Bucket], states: StateStore, device: torch.device, dtype: torch.dtype,
        sums: torch.dtype,
    ) -> None:  # fmt: skip
        """device: what computes. dtype, sums: dtypes of the weights and of the sums of gradients."""
        self.states, self._offload, self._buckets = states, offload, buckets
        most = max(bucket.states for bucket in buckets)
        self._staged = stagings(offload, device, largest(buckets), dtype, sums, most)
        self.stepper = Stepper(states, self._staged, offload.overlap)
        self.stepper.stalls = StreamStalls(device)
        sizes = [bucket.end - bucket.start if bucket.spare else 0 for bucket in buckets]
        if offload.spare_weights == "device":
            self._memory = torch.zeros(sum(sizes), dtype=dtype, device=device)
        else:
            self._memory = host_zeros(sum(sizes), dtype, pinned=device.type != "cpu")
        parts = zip(self._memory.split(sizes), buckets, strict=True)
        # By number of each bucket that is stepped ahead: memory for its weights.
        self._spare = {number: part for number, (part, bucket) in enumerate(parts) if bucket.spare}

    def take(self, unit: ShardedUnit, shards: Mapping[str, Tensor]) -> None:
        """Move a part of a new unit's optimizer states there, or none. shards: weight shards in the host's memory, by
        unit."""
        own = [number for number, bucket in enumerate(self._buckets) if bucket.unit == unit.spec.name]
        if not own:
            self._keep(unit)
            return
        buckets, before = self._buckets[own[0] : own[-1] + 1], unit.optimizer
        unit.at_rest = shards[unit.spec.name] if unit.hops.placement.writes_at_rest else None
        offloaded = OffloadedBuckets(self.stepper, own[0], buckets, self._spare, unit.at_rest)
        (start, end), first_offloaded = before.bounds, before.bounds[0] + buckets[0].start
        rules = unit.step_rule(first_offloaded, unit.hops.placement.backend), unit.step_rule(end, self._offload.backend)
        if unit.masters_are_weights:
            masters = unit.owned_weight
            resident = OptimizerShard(rules[0], (start, first_offloaded), masters[: first_offloaded - start])
            unit.optimizer = OffloadedShard(resident, offloaded, rules[1], {"master": masters})
        else:
            masters = before.read("master", start, end)
            resident = OptimizerShard(rules[0], (start, first_offloaded), masters[: first_offloaded - start].clone())
            unit.optimizer = OffloadedShard(resident, offloaded, rules[1], {})
            unit.optimizer.write("master", first_offloaded, masters[first_offloaded - start :])

    def _keep(self, unit: ShardedUnit) -> None:
        """Let checkpoints read the states of a unit that stays as late as those of the others."""
        (start, end), rule = (
            unit.optimizer.bounds,
            unit.step_rule(unit.optimizer.bounds[1], unit.hops.placement.backend),
        )
        masters = unit.owned_weight if unit.masters_are_weights else unit.optimizer.read("master", start, end)
        unit.optimizer = OptimizerShard(rule, (start, end), masters, read_late=True)

    def close(self) -> None:
        """End the threads, and free the memory or the files."""
        self.stepper.close()
        self.states.close()

    def usage(self) -> TierUsage:
        """Return the usage since the start."""
        waited, stalled = self.stepper.waited, self.stepper.stalls.seconds()
        moved = replace(self.states.usage(), compute_waited=waited, gpu_waited=stalled)
        return moved.with_link(*(one.link for one in self._staged))

    @property
    def nbytes(self) -> int:
        """Bytes of the host's memory, without pinned buffers through which gradients and weights pass."""
        return self.states.nbytes + (0 if self._offload.spare_weights == "device" else self._memory.nbytes)

    @property
    def device_nbytes(self) -> int:
        """Bytes of the device's memory."""
        weights = self._memory.nbytes if self._offload.spare_weights == "device" else 0
        return sum(staging.nbytes for staging in self._staged) + weights
