"""The bytes that a rank reads from and writes to each volume in an optimizer step that is applied. No torch in here."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

from llmtrain.cluster.layout import Axis
from llmtrain.plan.per_rank.near_volumes import for_rank
from llmtrain.plan.per_rank.offloaded_weights import offloaded_shards
from llmtrain.plan.per_rank.rank_activations import boundary_bytes, in_pages, rank_moves
from llmtrain.plan.per_rank.rank_buckets import rank_buckets
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.by_rank import ProgramsOf
from llmtrain.plan.program.gradient_buckets import gradient_buckets, gradient_sweeps
from llmtrain.plan.program.instructions import Gather
from llmtrain.plan.stripes import striped

Moved = dict[str, tuple[int, int]]
"""Bytes read and written, by the path of the volume."""

MovedOf = Callable[[int], Mapping[str, Moved]]


def moved_of(plan: Plan, programs: ProgramsOf) -> MovedOf:
    """Return a function that returns `volume_traffic` of a rank of the run, and counts it once."""

    return cache(lambda rank: volume_traffic(plan, rank, programs(first_like(plan, rank))))


def first_like(plan: Plan, rank: int) -> int:
    """Return the first of the data-parallel ranks of a rank of the run. They have the same program, which takes long to
    make."""
    axes = (Axis.PIPELINE, Axis.TENSOR)
    return sum(plan.grid.group_of(0, axis)[plan.grid.coordinate(rank, axis)] for axis in axes)


def volume_traffic(plan: Plan, rank: int, programs: Programs) -> dict[str, Moved]:
    """Return the bytes that a rank of the run moves, by what they are: optimizer, weights, gradients or activations.
    programs: of the rank."""
    near = for_rank(plan, rank)
    states, activations = near.sharding.offload, near.activation_offload
    found = {
        "optimizer": _moved(_optimizer(near, rank), states.paths, states.bandwidths),
        "weights": _moved(_weights(near, rank, programs), states.paths, states.bandwidths),
        "gradients": _moved(_gradients(near, rank, programs), states.paths, states.bandwidths),
        "activations": _moved(_activations(near, rank), activations.paths, activations.bandwidths),
    }
    return {name: moved for name, moved in found.items() if moved}


_Region = tuple[int, int, int]
"""Bytes of a region of a file, and how often it is read and written."""


def _optimizer(plan: Plan, rank: int) -> Iterator[_Region]:
    if plan.sharding.offload.tier == "nvme":
        yield from ((bucket.nbytes, 1, 1) for bucket in rank_buckets(plan, rank))


def _weights(plan: Plan, rank: int, programs: Programs) -> Iterator[_Region]:
    if plan.sharding.offload.parameters == "nvme":
        gathers = Counter(one.unit for one in programs.step.issues if isinstance(one, Gather) and not one.secondary)
        for unit, numel in offloaded_shards(plan, rank).items():
            yield in_pages(numel * plan.compute_bytes), gathers[unit], 1


def _gradients(plan: Plan, rank: int, programs: Programs) -> Iterator[_Region]:
    if plan.sharding.offload.gradients != "nvme":
        return
    units = gradient_buckets(plan, rank)
    sweeps = list(gradient_sweeps(units, programs))
    reads = Counter((sweep.unit, sweep.stepped) for sweep in sweeps if sweep.reads)
    writes = Counter((sweep.unit, sweep.stepped) for sweep in sweeps if sweep.writes)
    for name, unit in units.items():
        # Reads and writes of each bucket: (of one that other ranks step, of one that this rank steps).
        moved = [(count[name, False], count[name, False] + count[name, True]) for count in (reads, writes)]
        for bucket, owned in zip(unit.buckets, unit.owned, strict=True):
            yield bucket.nbytes, moved[0][owned], moved[1][owned]


def _activations(plan: Plan, rank: int) -> Iterator[_Region]:
    if plan.activation_offload.tier == "nvme":
        moves, size = rank_moves(plan, rank), in_pages(boundary_bytes(plan))
        written = Counter(save.region for save in moves.saves)
        yield from ((size, written[region], written[region]) for region in range(moves.regions))


def _moved(regions: Iterable[_Region], paths: Sequence[str], bandwidths: Sequence[float]) -> Moved:
    region_list, read, written = list(regions), [0] * len(paths), [0] * len(paths)
    by_region = striped([nbytes for nbytes, _, _ in region_list], bandwidths)
    for (_, reads, writes), sizes in zip(region_list, by_region, strict=True):
        for volume, size in enumerate(sizes):
            read[volume] += reads * size
            written[volume] += writes * size
    return dict(zip(paths, zip(read, written, strict=True), strict=True)) if region_list else {}
