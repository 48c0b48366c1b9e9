"""The buckets of a rank's offloaded sums of gradients, and how they move. No torch in here."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from llmtrain.cluster.levels import shard_range
from llmtrain.plan.offload import NORM_BLOCK, Bucket
from llmtrain.plan.per_rank.rank_units import rank_units
from llmtrain.plan.placement import Placement
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.instructions import Reduce


@dataclass(frozen=True)
class Move:
    """A bucket that comes to the host's memory and goes back. reads, writes: whether it is read from files before, and
    written after."""

    bucket: int
    reads: bool = True
    writes: bool = True


@dataclass(frozen=True)
class Sweep:
    """Buckets of one unit that move one after another. stepped: whether they are only those that the rank steps. reads,
    writes: see Move."""

    unit: str
    stepped: bool = False
    reads: bool = True
    writes: bool = True


@dataclass(frozen=True)
class UnitGradients:
    """The buckets of the gradient shard of one unit. first: number of the first of them. buckets: ranges from the first
    element of the shard. owned: which of them the rank steps. resident: elements of those that the device steps, which
    come first. hops_after_sum: see Placement."""

    first: int
    buckets: Sequence[Bucket]
    owned: Sequence[bool]
    resident: int
    hops_after_sum: bool

    @property
    def numbers(self) -> range:
        """The numbers of the buckets."""
        return range(self.first, self.first + len(self.buckets))

    @property
    def stepped(self) -> list[int]:
        """The numbers of the buckets that the rank steps."""
        return [number for number, owned in zip(self.numbers, self.owned, strict=True) if owned]


def gradient_buckets(plan: Plan, rank: int) -> dict[str, UnitGradients]:
    """Return the buckets of a rank of the run, by unit."""
    grid, found, first = plan.grid, dict[str, UnitGradients](), 0
    for spec in rank_units(plan, rank):
        placement = plan.sharding.placements[spec.name]
        if placement.moves_gradients:
            data_rank, padded = grid.coordinate(rank, *placement.axes), placement.padded(spec.numel)
            split = list(_split(placement, padded, data_rank, plan.sharding.offload.bucket))
            found[spec.name] = UnitGradients(
                first=first,
                buckets=[Bucket(spec.name, start, end, 1) for start, end, _ in split],
                owned=[own for _, _, own in split],
                resident=plan.sharding.offload.resident(spec.name, padded // placement.degrees.optimizer),
                hops_after_sum=placement.hops_after_sum,
            )
            first += len(split)
    return found


def gradient_sizes(plan: Plan, rank: int) -> Counter[Bucket]:
    """Return how many buckets of a rank of the run have a size: each stands for all like it, whatever its unit."""
    grid, found = plan.grid, Counter[Bucket]()
    units = Counter((plan.sharding.placements[spec.name], spec.numel) for spec in rank_units(plan, rank))
    for (placement, numel), count in units.items():
        if placement.moves_gradients:
            data_rank = grid.coordinate(rank, *placement.axes)
            for start, end, _ in _split(placement, placement.padded(numel), data_rank, plan.sharding.offload.bucket):
                found[Bucket("", 0, end - start, 1)] += count
    return found


def _split(placement: Placement, padded: int, data_rank: int, bucket: int) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, end, whether the rank steps it) of the buckets of a gradient shard, none of which divides a block
    of the gradient norm. data_rank: the rank's coordinate along the placement's axes."""
    size = -(-bucket // NORM_BLOCK) * NORM_BLOCK
    (first, last), (start, end) = (
        shard_range(placement.levels, data_rank, degree, padded)
        for degree in (placement.degrees.gradients, placement.degrees.optimizer)
    )
    for begin, until, owned in ((first, start, False), (start, end, True), (end, last, False)):
        if begin < until:
            bounds = [begin, *range((begin // size + 1) * size, until, size), until]
            yield from ((one - first, other - first, owned) for one, other in pairwise(bounds))


def gradient_moves(units: dict[str, UnitGradients], programs: Programs) -> list[Move]:
    """Return how the buckets of a rank move in one step, in order. units: of the rank."""
    return [
        Move(number, sweep.reads, sweep.writes)
        for sweep in gradient_sweeps(units, programs)
        for number in (units[sweep.unit].stepped if sweep.stepped else units[sweep.unit].numbers)
    ]


def gradient_sweeps(units: dict[str, UnitGradients], programs: Programs) -> Iterator[Sweep]:
    """Yield how the buckets of units move in one step, in order: at each reduction, and then to be stepped."""
    reduces = (issue for issue in programs.step.issues if isinstance(issue, Reduce) and issue.unit in units)
    for issue in reduces:
        stays = not (issue.last and units[issue.unit].hops_after_sum)
        if stays or not issue.first:
            yield Sweep(issue.unit, reads=not issue.first, writes=stays)
        if not stays:
            yield Sweep(issue.unit, stepped=True, reads=False)
    for name in units:
        yield Sweep(name, stepped=True, writes=False)
