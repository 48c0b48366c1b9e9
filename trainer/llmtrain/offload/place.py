"""From a plan to the memory and files outside of this rank's device, and to the units whose states rest there."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from llmtrain.comm.device import give_freed_memory_back, is_cpu
from llmtrain.comm.ranks import Ranks
from llmtrain.comm.stalls import StreamStalls
from llmtrain.comm.stream import new_stream, waiting_stream
from llmtrain.model.dtypes import DTYPES
from llmtrain.offload.gradient_store import BucketedGradients
from llmtrain.offload.gradient_tiers import FileGradients, GradientTier, HostGradients
from llmtrain.offload.optimizer_states import OffloadedStates, open_states
from llmtrain.offload.usage import TierUsage
from llmtrain.offload.weight_stores import FileWeights, HostWeights, Volumes
from llmtrain.plan.per_rank.offloaded_weights import is_direct, offloaded_shards
from llmtrain.plan.per_rank.rank_buckets import rank_buckets
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.gradient_buckets import gradient_buckets, gradient_moves
from llmtrain.sharding.offloaded_gradients import OffloadedGradients
from llmtrain.sharding.offloaded_weights import OffloadedWeights
from llmtrain.sharding.unit import ShardedUnit


@dataclass(frozen=True)
class OffloadStores:
    """What a rank offloads. states: optimizer states. weights: weight shards. gradients: sums of gradients. Each is
    None if it is not offloaded. moving: these three, as far as there are any. shards: the weight shards in the host's
    memory, by unit."""

    states: OffloadedStates | None
    weights: OffloadedWeights | None
    gradients: GradientTier | None
    moving: Sequence["Moving"]
    shards: Mapping[str, Tensor]

    def usage(self) -> TierUsage:
        """Return the usage since the start."""
        stalled = 0.0 if self.weights is None else self.weights.stalls.seconds()
        return sum((one.usage() for one in self.moving), TierUsage(gpu_waited=stalled))

    def close(self) -> None:
        """Free the memory and the files. Nothing moves any more."""
        if self.weights is not None:
            self.weights.reads.close()
            self.weights.writes.close()
        for one in self.moving:
            one.close()


SharesOf = Callable[[str, ShardedUnit], list[tuple[int, int, float]]]


class Moving(Protocol):
    """Memory or files whose content moves."""

    def usage(self) -> TierUsage:
        """Return the usage since the start."""

    def close(self) -> None:
        """Free the memory or the files."""


def open_offload(plan: Plan, ranks: Ranks, programs: Programs) -> OffloadStores:
    """Return the memory and files for what a rank of the run offloads, without values. Raises RunFailedError."""
    offload = plan.sharding.offload
    if "nvme" in (offload.tier, offload.parameters, offload.gradients) and is_cpu(ranks.device):
        # Memory that is free but kept would take the place of what has left.
        give_freed_memory_back()
    dtype, sums = DTYPES[plan.compute], DTYPES[plan.gradients]
    states = open_states(offload, rank_buckets(plan, ranks.rank), ranks.device, dtype, sums)
    if states is not None:
        # A step may last longer than the watchdog's patience, and so may writing all states at the start.
        states.stepper.moving = ranks.activity.moving
    weights, store = _open_weights(plan, ranks)
    gradients = _open_gradients(plan, ranks, programs)
    moving = [one for one in (states, store, gradients) if one is not None]
    return OffloadStores(states, weights, gradients, moving, store.shards if isinstance(store, HostWeights) else {})


def _open_gradients(plan: Plan, ranks: Ranks, programs: Programs) -> GradientTier | None:
    offload, units = plan.sharding.offload, gradient_buckets(plan, ranks.rank)
    buckets = [bucket for unit in units.values() for bucket in unit.buckets]
    if not buckets:
        return None
    pinned = not is_cpu(ranks.device)
    if offload.gradients == "host":
        return HostGradients(buckets, pinned)
    return FileGradients(buckets, offload.paths, offload.bandwidths, gradient_moves(units, programs), pinned)


def offloaded_gradients(
    plan: Plan, ranks: Ranks, offloaded: OffloadStores, units: Sequence[ShardedUnit], shares: SharesOf
) -> OffloadedGradients | None:
    """Return where sums of gradients rest that are not on the device. shares: the ranges of each unit whose squared
    norms are asked for."""
    if offloaded.gradients is None:
        return None
    buckets = gradient_buckets(plan, ranks.rank)
    moved = [unit for unit in units if unit.spec.name in buckets]
    ranges = {unit.spec.name: [(start, end) for start, end, _ in shares(unit.spec.name, unit)] for unit in moved}
    starts = {unit.spec.name: unit.ranges.gradients[0] for unit in moved}
    store = BucketedGradients(offloaded.gradients, buckets, ranges, starts, pinned=not is_cpu(ranks.device))
    return OffloadedGradients(store, waiting_stream(ranks.device, "sums of gradients", ranks.activity))


def _open_weights(plan: Plan, ranks: Ranks) -> tuple[OffloadedWeights | None, Moving | None]:
    sizes, dtype, pinned = offloaded_shards(plan, ranks.rank), DTYPES[plan.compute], not is_cpu(ranks.device)
    if not sizes:
        return None, None
    offload = plan.sharding.offload
    in_files, direct = offload.parameters == "nvme", not pinned and is_direct(plan, ranks.rank)
    store: HostWeights | FileWeights = (
        FileWeights(sizes, dtype, pinned, Volumes(offload.paths, offload.bandwidths), direct)
        if in_files
        else HostWeights(sizes, dtype, pinned)
    )
    made = waiting_stream if in_files else new_stream
    reads, writes = (made(ranks.device, f"{what} of weights", ranks.activity) for what in ("reads", "writes"))
    return OffloadedWeights(store, reads, writes, StreamStalls(ranks.device)), store


def place_units(units: Iterable[ShardedUnit], offloaded: OffloadStores) -> list[ShardedUnit]:
    """Move the optimizer states of units that rest outside there, and return the units."""
    found = []
    for unit in units:
        # One unit after the other: together, the states of all units may not fit the memory.
        if offloaded.states is not None:
            offloaded.states.take(unit, offloaded.shards)
        found.append(unit)
    return found
