"""How long a checkpoint that is saved holds up the run, by the described rates. No torch in here.

Offloaded states are read while the checkpoint is written. With `checkpoint.async`, the next step computes meanwhile,
and its optimizer waits until all of them are read. Other states are copied before.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmtrain.cluster.layout import Axis, even_share
from llmtrain.cluster.levels import shard_range
from llmtrain.plan.cost.lane_times import described_rates
from llmtrain.plan.memory.checkpoint_copies import STATE_BYTES, copy_bytes
from llmtrain.plan.per_rank.near_volumes import for_rank
from llmtrain.plan.per_rank.rank_units import rank_units
from llmtrain.plan.per_rank.roles import Role
from llmtrain.plan.per_rank.tied_embedding import holds_second_copy
from llmtrain.plan.plan import Plan


@dataclass(frozen=True)
class SaveHold:
    """The time for which a save holds up a rank.

    ranks: number of ranks of its node, which save at the same time. taken: bytes of states that they read, or copy.
    waits: whether the next optimizer step waits until they are read. seconds: the time that this takes at least; None
    if a rate is not known. passes: seconds of the next step's passes, which run meanwhile; 0.0 if nothing computes
    meanwhile, None if the accelerator's peak is not known.
    """

    ranks: int
    taken: int
    waits: bool
    seconds: float | None
    passes: float | None

    @property
    def held(self) -> float | None:
        """Seconds for which the run is held up; None if they are not known."""
        if self.seconds is None or self.passes is None:
            return None
        return max(0.0, self.seconds - self.passes)


@dataclass(frozen=True)
class _Written:
    """What ranks write of their states. nbytes: bytes of all that they write. read: bytes of it that they read from
    each volume, by its folder."""

    nbytes: int
    read: Counter[str]


def save_hold(plan: Plan, role: Role, passes: float | None) -> SaveHold | None:
    """Return how long a save holds up the first rank of a role before its states may change, without the writing that a
    run without `checkpoint.async` waits for; None if it takes nothing before. passes: seconds of a step's computation,
    if they are known."""
    node, rates = _node(plan, role.rank), described_rates(plan)
    if copied := copy_bytes(plan, role):
        alone = plan.device == "cuda"
        rate, moved = (rates.link, copied) if alone else (rates.host, 2 * copied * len(node))
        taken = copied if alone else copied * len(node)
        return SaveHold(1 if alone else len(node), taken, False, None if rate is None else moved / rate, 0.0)
    if not plan.sharding.offload.share:
        return None
    written = _written(plan, node)
    reads = [(count, rates.volumes.get(path)) for path, count in written.read.items() if count]
    known = [count / rate for count, rate in reads if rate is not None]
    seconds = None
    if rates.host is not None and len(known) == len(reads):
        # One thread reads a block and gives a copy to the system.
        seconds = max(known, default=0.0) + 2 * written.nbytes / rates.host
    return SaveHold(len(node), written.nbytes, True, seconds, passes if plan.checkpoint.asynchronous else 0.0)


def _node(plan: Plan, rank: int) -> range:
    size = plan.cluster.node.ranks if plan.cluster else 1
    first = rank // size * size
    return range(first, min(first + size, plan.grid.world))


def _written(plan: Plan, node: Sequence[int]) -> _Written:
    total, read = 0, Counter[str]()
    for rank in node:
        offload, offloaded = for_rank(plan, rank).sharding.offload, 0
        for count, in_files in _states(plan, rank):
            total += count
            offloaded += in_files
        for path, weight in zip(offload.paths, offload.bandwidths, strict=True):
            read[path] += int(offloaded * weight / sum(offload.bandwidths))
    return _Written(total, read)


def _states(plan: Plan, rank: int) -> Iterator[tuple[int, int]]:
    """Yield the bytes of each unit's states that a rank writes, and of that in files: an even share of what ranks with
    the same optimizer shard hold."""
    offload, grid, second = plan.sharding.offload, plan.grid, holds_second_copy(plan, rank)
    for unit in rank_units(plan, rank):
        if second and unit.name == "embedding":
            continue
        placement = plan.sharding.placements[unit.name]
        degrees, padded = placement.degrees, placement.padded(unit.numel)
        data_rank = grid.coordinate(rank, *placement.axes)
        own = unit.replicated_from if grid.coordinate(rank, Axis.TENSOR) else unit.numel
        start, end = (min(one, own) for one in shard_range(placement.levels, data_rank, degrees.optimizer, padded))
        copies, copy = degrees.ranks // degrees.optimizer, data_rank // degrees.optimizer
        first, last = even_share(end - start, copies, copy)
        leaves = max(first, min(last, offload.resident(unit.name, padded // degrees.optimizer)))
        states = 3 if placement.masters == "separate" else 2
        yield STATE_BYTES * (last - first), 4 * states * (last - leaves) if offload.tier == "nvme" else 0
