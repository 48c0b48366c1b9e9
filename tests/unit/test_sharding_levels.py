"""Degrees, levels and shard ranges, for every nesting of degrees up to 24 ranks: what each rank holds, and its
traffic."""

from collections.abc import Iterator
from itertools import groupby, pairwise
from math import prod

import pytest
from llmtrain.cluster.layout import Axis
from llmtrain.cluster.levels import Degrees, levels_of, shard_range
from llmtrain.cluster.tiers import Tier
from llmtrain.plan.per_rank.states import StateBytes, unit_states
from llmtrain.plan.placement import UNIT_ALIGNMENT, Placement
from llmtrain.plan.plan import Quantization
from llmtrain.plan.traffic import gather_traffic, reduce_traffic
from llmtrain.sharding.unit import ShardRanges

from tests.unit.divisors import divisors

PLAIN = Quantization(weights=0, secondary=0, gradients=0, block=256)
TIERS = {
    1: (Tier("all", 1),),
    2: (Tier("all", 2),),
    6: (Tier("node", 3), Tier("all", 6)),
    8: (Tier("die", 2), Tier("node", 4), Tier("all", 8)),
    12: (Tier("node", 4), Tier("all", 12)),
    24: (Tier("die", 2), Tier("node", 6), Tier("cluster", 12), Tier("all", 24)),
}


def every() -> Iterator[Degrees]:
    """Yield all degrees that a recipe may resolve to."""
    for ranks in TIERS:
        for optimizer in divisors(ranks):
            for gradients in divisors(optimizer):
                for weights in divisors(gradients):
                    chain = (weights, gradients, optimizer, ranks)
                    second = [d for d in divisors(ranks) if all(d % each == 0 or each % d == 0 for each in chain)]
                    for secondary in [0, *(second if weights > 1 else [])]:
                        yield Degrees(ranks, weights, gradients, optimizer, secondary)


EVERY = list(every())


def spans(degrees: Degrees) -> set[int]:
    return {degrees.weights, degrees.gradients, degrees.optimizer, degrees.ranks, degrees.secondary or 1} - {1}


def test_every_degree_is_a_span_of_levels() -> None:
    assert len(EVERY) > 250
    for degrees in EVERY:
        levels = levels_of(degrees, TIERS[degrees.ranks])
        assert prod(level.radix for level in levels) == degrees.ranks
        assert all(level.radix > 1 for level in levels)
        assert [level.stride for level in levels] == [
            prod(lower.radix for lower in levels[:i]) for i in range(len(levels))
        ]
        assert spans(degrees) <= {level.span for level in levels}
        for level in levels:
            groups = level.groups(degrees.ranks)
            assert sorted(place for group in groups for place in group) == list(range(degrees.ranks))
            # The tier is the smallest that holds each group.
            held = [
                tier for tier in TIERS[degrees.ranks] if all(len({p // tier.ranks for p in g}) == 1 for g in groups)
            ]
            assert level.tier == held[0].name


def test_cuts_tile_the_unit_and_lie_in_each_other() -> None:
    for degrees in EVERY:
        levels = levels_of(degrees, TIERS[degrees.ranks])
        for numel in (1, 1000, UNIT_ALIGNMENT * degrees.ranks):
            placement = Placement(axes=(Axis.DATA,), degrees=degrees, levels=levels)
            cuts = [ShardRanges.of(numel, placement, place) for place in range(degrees.ranks)]
            (padded,) = {cut.padded for cut in cuts}
            assert numel <= padded < numel + degrees.ranks * UNIT_ALIGNMENT
            for state, degree in (
                ("weights", degrees.weights),
                ("gradients", degrees.gradients),
                ("optimizer", degrees.optimizer),
            ):
                held = sorted(getattr(cut, state) for cut in cuts)
                copies = [(part, len(list(same))) for part, same in groupby(held)]
                assert [part for part, _ in copies] == [
                    (i * padded // degree, (i + 1) * padded // degree) for i in range(degree)
                ]
                assert {count for _, count in copies} == {degrees.ranks // degree}
                # The ranks of one aligned group together hold the entire unit.
                assert len({getattr(cut, state) for cut in cuts[:degree]}) == degree
            for cut in cuts:
                assert cut.weights[0] <= cut.gradients[0] <= cut.optimizer[0]
                assert cut.optimizer[1] <= cut.gradients[1] <= cut.weights[1]


def test_gathers_land_in_place() -> None:
    """After each hop, slowest first, a rank holds a contiguous range in order; after the last hop, it holds the
    unit."""
    for degrees in EVERY:
        levels = levels_of(degrees, TIERS[degrees.ranks])
        unit = degrees.ranks * UNIT_ALIGNMENT
        for degree in spans(degrees):
            held = {place: shard_range(levels, place, degree, unit) for place in range(degrees.ranks)}
            for level in reversed([level for level in levels if level.span <= degree]):
                for group in level.groups(degrees.ranks):
                    parts = [held[place] for place in group]
                    assert all(first[1] == second[0] for first, second in pairwise(parts))
                    held.update(dict.fromkeys(group, (parts[0][0], parts[-1][1])))
            assert set(held.values()) == {(0, unit)}


def test_what_a_node_holds_together_is_contiguous() -> None:
    """Shards of 8 ranks in nodes of 4: across nodes, each rank gathers the shards of its peers (MiCS, section 3.3)."""
    levels = levels_of(Degrees(8, 8, 8, 8), (Tier("node", 4), Tier("all", 8)))
    assert [shard_range(levels, place, 8, 8)[0] for place in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]


def sent(degrees: Degrees, inner: int, outer: int, numel: int) -> dict[str, int]:
    """Return the bytes that a rank sends by tier, to gather 16-bit elements."""
    levels = [level for level in levels_of(degrees, TIERS[degrees.ranks]) if inner < level.span <= outer]
    found: dict[str, int] = {}
    for call in gather_traffic("weights", levels, numel, 2, None):
        found[call.tier] = found.get(call.tier, 0) + call.sent
    return found


@pytest.mark.parametrize(("ranks", "node"), [(8, 4), (12, 4), (6, 3), (24, 6)])
def test_hierarchical_gathers_send_what_mics_says(ranks: int, node: int) -> None:
    """MiCS, section 3.3: (p - k) M / p bytes cross into each node, for M bytes over p ranks in nodes of k."""
    numel = 1000 * ranks * UNIT_ALIGNMENT
    size = 2 * numel
    by_tier = sent(Degrees(ranks, ranks, ranks, ranks), 1, ranks, numel)
    inside = {tier.name for tier in TIERS[ranks] if tier.ranks <= node}
    between = sum(count for tier, count in by_tier.items() if tier not in inside)
    assert between * node == (ranks - node) * size // ranks
    # In one gather over all ranks, each rank would send its shard to all others.
    assert sum(by_tier.values()) == size * (ranks - 1) // ranks


def test_the_second_hop_sends_half_of_an_all_reduce() -> None:
    degrees = Degrees(8, 2, 4, 8)
    levels = [level for level in levels_of(degrees, TIERS[8]) if 4 < level.span <= 8]
    shard = 8000 * UNIT_ALIGNMENT
    second = sum(call.sent for call in reduce_traffic("gradients", levels, shard, (2, 2), None))
    back = sum(call.sent for call in gather_traffic("replicas", levels, shard, 2, None))
    all_reduce = 2 * (2 - 1) * shard * 2 // 2
    assert second == all_reduce // 2
    assert second + back == all_reduce


def test_bytes_held_are_those_that_cuts_give() -> None:
    for degrees in EVERY:
        numel = degrees.ranks * UNIT_ALIGNMENT * 7
        levels = levels_of(degrees, TIERS[degrees.ranks])
        placement = Placement(axes=(Axis.DATA,), degrees=degrees, levels=levels)
        cut = ShardRanges.of(numel, placement, degrees.ranks - 1)
        weights, gradients, optimizer = (end - start for start, end in (cut.weights, cut.gradients, cut.optimizer))
        second = 2 * numel // degrees.secondary if degrees.secondary else 0
        expected = StateBytes(
            weights=2 * weights, gradients=4 * gradients, masters=4 * optimizer, moments=8 * optimizer, secondary=second
        )
        assert unit_states(numel, placement, PLAIN, 2) == expected
