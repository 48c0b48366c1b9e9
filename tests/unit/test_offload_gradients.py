"""Sums of gradients outside of the device: the bits of sums in memory, in every order of moves that a step has."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from llmtrain.offload.gradient_store import BucketedGradients
from llmtrain.offload.gradient_tiers import FileGradients, GradientTier, HostGradients
from llmtrain.plan.offload import NORM_BLOCK, Bucket
from llmtrain.plan.program.gradient_buckets import Move, UnitGradients
from llmtrain.sharding.optimizer_shard import ElementRange
from llmtrain_kernels.squared_sum.op import SQUARES_BLOCK, squared_sum
from torch import Tensor

PASSES = 3
# Elements of each unit, and of its buckets: a single bucket, several, and a last one that is smaller.
SIZES = {
    "one bucket each": ({"a": 4096, "b": 4096}, 4096),
    "a single bucket": ({"a": 8192}, 8192),
    "several": ({"a": 20480, "b": 4096, "c": 12288}, 8192),
}
Make = Callable[[Sequence[Bucket], Sequence[Move]], GradientTier]


def cut(sizes: dict[str, int], bucket: int) -> dict[str, UnitGradients]:
    found, first = {}, 0
    for unit, size in sizes.items():
        buckets = [Bucket(unit, start, min(start + bucket, size), 1) for start in range(0, size, bucket)]
        found[unit] = UnitGradients(first, buckets, [True] * len(buckets), resident=0, hops_after_sum=False)
        first += len(buckets)
    return found


def moves(units: dict[str, UnitGradients]) -> list[Move]:
    backward = [number for unit in reversed(units.values()) for number in unit.numbers]
    found = [Move(number, reads=count > 0) for count in range(PASSES) for number in backward]
    return [*found, *(Move(number, writes=False) for unit in units.values() for number in unit.numbers)]


@contextmanager
def stored(tier: str, units: dict[str, UnitGradients], folder: Path) -> Iterator[BucketedGradients]:
    buckets = [bucket for unit in units.values() for bucket in unit.buckets]
    made: GradientTier = (
        HostGradients(buckets, pinned=False)
        if tier == "host"
        else FileGradients(buckets, [str(folder)], [1.0], moves(units), pinned=False)
    )
    # The second range begins within a block of the norm.
    ranges = {name: [(0, 1000), (1000, unit.buckets[-1].end)] for name, unit in units.items()}
    yield BucketedGradients(made, units, ranges, dict.fromkeys(units, 0), pinned=False)
    made.close()


@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("name", SIZES)
def test_sums_and_norms_have_the_same_bits(name: str, tier: str, tmp_path: Path) -> None:
    sizes, bucket = SIZES[name]
    units, drawn = cut(sizes, bucket), torch.Generator().manual_seed(0)
    with stored(tier, units, tmp_path) as store:
        for step in range(4):
            store.begin()
            sums = added(store, sizes, drawn)
            for unit, total in sums.items():
                for within in ((0, 1000), (1000, sizes[unit])):
                    assert store.squares(unit, within) == float(squared_sum(total[slice(*within)], within[0]))
            # A step that is skipped reads nothing.
            if step == 1:
                continue
            for unit in sizes:
                parts = read(store, unit)
                assert torch.equal(torch.cat([values for _, values in parts]), sums[unit])
                assert [start for (start, _), _ in parts] == [one.start for one in units[unit].buckets]


class Reader:
    """A ticket of what reads values until it is waited for."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.before, self.waited = values, values.clone(), False

    def wait(self) -> None:
        assert torch.equal(self.values, self.before)
        self.waited = True


def read(store: BucketedGradients, unit: str, readers: list[Reader] | None = None) -> list[tuple[ElementRange, Tensor]]:
    """Return the ranges with which a unit is stepped, and their gradients. readers: receives tickets of what reads them
    later; None: nothing does."""
    found = list[tuple[ElementRange, Tensor]]()

    def step(within: ElementRange, values: Tensor) -> Reader | None:
        reader = Reader(values)
        found.append((within, reader.before))
        if readers is None:
            return None
        readers.append(reader)
        return reader

    store.step(unit, step)
    return found


@pytest.mark.parametrize(("tier", "kept"), [("host", 9), ("nvme", 2)])
def test_buckets_stay_until_they_are_read(tier: str, kept: int, tmp_path: Path) -> None:
    """All that the host's memory holds; of files, as many as have slots that are not read ahead into."""
    sizes, drawn = {"a": 20480, "b": 4096, "c": 12288}, torch.Generator().manual_seed(0)
    units = cut(sizes, 4096)
    with stored(tier, units, tmp_path) as store:
        for _ in range(3):
            store.begin()
            sums, readers = added(store, sizes, drawn), list[Reader]()
            for unit in sizes:
                assert torch.equal(torch.cat([values for _, values in read(store, unit, readers)]), sums[unit])
            assert [reader.waited for reader in readers] == [True] * (9 - kept) + [False] * kept
            if tier == "host":
                # What computes the next gradients waits for these.
                for reader in readers:
                    reader.wait()
            store.begin()
            assert all(reader.waited for reader in readers)


def added(store: BucketedGradients, sizes: dict[str, int], drawn: torch.Generator) -> dict[str, Tensor]:
    """Add the gradients of all passes, and return their sums."""
    sums = {unit: torch.zeros(size) for unit, size in sizes.items()}
    for number in range(PASSES):
        for unit, size in reversed(sizes.items()):
            part = torch.randn(size, generator=drawn).bfloat16()
            store.add(unit, part, first=number == 0, last=number == PASSES - 1)
            sums[unit] = part.float() if number == 0 else sums[unit] + part
    return sums


def test_a_move_that_the_step_does_not_have_raises(tmp_path: Path) -> None:
    units = cut({"a": 8192, "b": 4096}, 4096)
    with stored("nvme", units, tmp_path) as store, pytest.raises(RuntimeError, match="next move"):
        store.add("a", torch.zeros(8192), first=True, last=False)


def test_the_plan_cuts_no_block_of_the_norm() -> None:
    """The plan, which is without torch, has the kernel's number."""
    assert NORM_BLOCK == SQUARES_BLOCK
