"""A check that replicas of model states are equal: it finds silent memory errors."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

import xxhash
from torch import Tensor

from llmtrain.checkpoint.safetensors_file import bytes_of
from llmtrain.comm.device import to_host
from llmtrain.comm.ranks import Ranks
from llmtrain.errors import RESUMES, RunFailedError
from llmtrain.sharding.engine import Engine
from llmtrain.sharding.optimizer_shard import STATES
from llmtrain.sharding.unit import CHUNK, ShardedUnit

KINDS = ("weights", "optimizer states", "weights that tensor-parallel ranks share", "tied embeddings")

# A range of a rank's states: which canonical elements, and their values, chunk by chunk.
Held = tuple[list[tuple[str, int, int]], Iterator[Tensor]]


def compare(engine: Engine, ranks: Ranks, step: int, before: int) -> None:
    """Compare replicas by XXH3 checksums. Collective.

    step: steps done. before: the step after which replicas were last equal. Raises RunFailedError, the same on all
    ranks, which names the ranks that differ from the majority.
    """
    if ranks.layout.world == 1:
        return
    ranks.activity.record("comparing replicas")
    engine.weights.updates.finish()
    range_checksums = ranks.gather_all([_checksum_of_ranges(_held(engine, kind)) for kind in KINDS])
    own = range_checksums[ranks.rank]
    # Values that no other rank holds, as with zero.stage 3, are not read.
    copied = [sum(other[index] == own[index] for other in range_checksums) > 1 for index in range(len(KINDS))]
    # Reading them may last longer than the watchdog's patience.
    moving = ranks.activity.moving
    values = [
        _checksum_of_values(_held(engine, kind), moving) if some else 0
        for kind, some in zip(KINDS, copied, strict=True)
    ]
    table = ranks.gather_all(values)
    for index, kind in enumerate(KINDS):
        replicas: dict[int, dict[int, int]] = defaultdict(dict)
        for rank, (what, content) in enumerate(zip(range_checksums, table, strict=True)):
            replicas[what[index]][rank] = content[index]
        for contents in replicas.values():
            if len(set(contents.values())) > 1:
                raise RunFailedError(_sentence(kind, contents, ranks, step, before))


def _held(engine: Engine, kind: str) -> Iterator[Held]:
    """Yield this rank's states of a kind, unit by unit."""
    groups = engine.gradients.replica_groups
    for name, unit in engine.units.items():
        if kind == "weights":
            yield _weights(engine, unit, unit.ranges.weights[0])
        elif kind == "optimizer states" or (kind == "tied embeddings" and name in groups.tied):
            yield _optimizer_states(unit)
        elif kind == "weights that tensor-parallel ranks share" and groups.copies > 1:
            yield _weights(engine, unit, max(unit.spec.replicated_from, unit.ranges.weights[0]))


def _weights(engine: Engine, unit: ShardedUnit, start: int) -> Held:
    """Return the weights that this rank holds, from element `start` of the unit."""
    end = max(start, min(unit.ranges.weights[1], unit.spec.numel))
    chunks = ((first, min(first + CHUNK, end)) for first in range(start, end, CHUNK))
    return _ranges(unit, start, end), (engine.weights.read(unit, *chunk) for chunk in chunks)


def _optimizer_states(unit: ShardedUnit) -> Held:
    start = unit.ranges.optimizer[0]
    end = max(start, min(unit.ranges.optimizer[1], unit.spec.numel))
    chunks = [(first, min(first + CHUNK, end)) for first in range(start, end, CHUNK)]
    return _ranges(unit, start, end), (unit.optimizer.read(name, *chunk) for name in STATES for chunk in chunks)


def _ranges(unit: ShardedUnit, start: int, end: int) -> list[tuple[str, int, int]]:
    """Return the canonical ranges in the range `[start, end)` of a unit."""
    return [(tensor.name, first, last) for tensor, first, last in unit.spec.tensor_ranges(start, end)]


def _checksum_of_ranges(states: Iterable[Held]) -> int:
    """Return a checksum of the ranges' names, as int64. It reads no values."""
    found = xxhash.xxh3_64()
    for ranges, _ in states:
        found.update(repr(ranges).encode())
    return found.intdigest() - 2**63


def _checksum_of_values(states: Iterable[Held], moving: Callable[[], object]) -> int:
    """Return a checksum of the ranges' values, as int64. moving: called for each chunk."""
    found = xxhash.xxh3_64()
    for _, chunks in states:
        for chunk in chunks:
            found.update(bytes_of(to_host(chunk)))
            moving()
    return found.intdigest() - 2**63


def _sentence(kind: str, contents: dict[int, int], ranks: Ranks, step: int, before: int) -> str:
    (most, count), *others = Counter(contents.values()).most_common()
    odd = [rank for rank, content in contents.items() if content != most]
    if others and others[0][1] == count:
        named = f"{_names(list(contents), ranks)} hold different {kind}, none of them in a majority"
    else:
        named = f"{_names(odd, ranks)} holds other {kind} than ranks {_listed(set(contents) - set(odd))}"
    return (
        f"{named}, found after step {step}; all were equal after step {before}, and so were those of every checkpoint. "
        "Check the memory of that machine; " + RESUMES
    )


def _names(found: list[int], ranks: Ranks) -> str:
    return " and ".join(f"rank {rank} on {ranks.host_of(rank)}" for rank in found[:4])


def _listed(ranks: set[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
