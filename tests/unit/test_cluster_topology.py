"""Axes of a layout on a cluster, over all small meshes: tiers along an axis, stages' speeds, and bytes that cross."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal

import pytest
from llmtrain.cluster.description import Cluster
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.load import load_cluster
from llmtrain.cluster.parallel import ParallelConfig
from llmtrain.cluster.tiers import Tier, axis_tiers, tier_between, tier_ranks, tiers
from llmtrain.cluster.topology import HOLMES, cluster_of, layout_degrees, node_of, placement_advice, stage_speeds
from llmtrain.errors import BadInputError

from tests.unit.divisors import divisors

Order = Literal["pipeline-data-tensor", "data-pipeline-tensor"]
ORDERS: tuple[Order, ...] = (HOLMES, "data-pipeline-tensor")
WORLDS = (1, 2, 4, 6, 8, 12, 16, 24)


def meshes(world: int) -> Iterator[Layout]:
    for tensor in divisors(world):
        for pipeline in divisors(world // tensor):
            for order in ORDERS:
                yield Layout(layout_degrees(ParallelConfig(tensor=tensor, pipeline=pipeline, order=order), world))


def chains(world: int) -> Iterator[tuple[Tier, ...]]:
    """Return all nested tiers of up to three sizes."""
    for small in divisors(world):
        for middle in (each for each in divisors(world) if each % small == 0):
            sizes = sorted({small, middle, world})
            names = ["all", "node", "die"][: len(sizes)][::-1]
            yield tuple(Tier(name, size, 1e9 / size) for name, size in zip(names, sizes, strict=True))


def neighbours(layout: Layout, axis: Axis, size: int) -> int:
    """Return the most neighbours, of a number that divides the axis, that share a tier of `size` ranks wherever they
    are."""
    groups = layout.groups(axis)

    def share(count: int) -> bool:
        parts = [group[first : first + count] for group in groups for first in range(0, len(group), count)]
        return all(part[0] // size == part[-1] // size for part in parts)

    return max(count for count in divisors(layout.degrees[axis]) if share(count))


@pytest.mark.parametrize("world", WORLDS)
def test_tiers_along_an_axis(world: int) -> None:
    for layout in meshes(world):
        for links in chains(world):
            for axis in Axis:
                found = axis_tiers(links, layout, axis)
                assert found[-1].ranks == layout.degrees[axis]
                assert found[-1].name == "all"
                assert all(low.ranks < high.ranks and high.ranks % low.ranks == 0 for low, high in pairwise(found))
                for tier in links:
                    assert tier_ranks(found, tier.name) == neighbours(layout, axis, tier.ranks)


@pytest.mark.parametrize("world", WORLDS)
def test_the_only_axis_sees_the_tiers_as_they_are(world: int) -> None:
    for links in [*chains(world), tiers(None, world, 2), tiers(None, world, world)]:
        assert axis_tiers(links, Layout({Axis.DATA: world}), Axis.DATA) == links
        for order in ORDERS:
            alone = Layout(layout_degrees(ParallelConfig(order=order), world))
            assert axis_tiers(links, alone, Axis.DATA) == links


def test_tiers_that_become_alike() -> None:
    frontier = load_cluster("frontier")
    links = tiers(frontier, 64, 8)
    inside = Layout(layout_degrees(ParallelConfig(tensor=2, pipeline=16), 64))
    # Two dies share a card; neighbours along the data axis are on two cards of one node.
    die, everything = axis_tiers(links, inside, Axis.DATA)
    assert (die.name, die.ranks) == ("die", 1)
    assert (everything.name, everything.ranks, everything.bandwidth) == ("all", 2, 50e9)
    assert everything.aliases == ("node", "cluster")
    across = Layout(layout_degrees(ParallelConfig(tensor=8, pipeline=2), 64))
    found = axis_tiers(links, across, Axis.DATA)
    assert [(tier.name, tier.ranks, tier.aliases) for tier in found] == [
        ("node", 1, ("die",)),
        ("all", 4, ("cluster",)),
    ]
    assert found[1].bandwidth == 100e9


@pytest.mark.parametrize("order", ORDERS)
def test_degrees_in_an_order(order: Order) -> None:
    degrees = layout_degrees(ParallelConfig(tensor=2, pipeline=3, order=order), 24)
    assert [axis.value for axis in degrees] == order.split("-")
    assert degrees == {Axis.TENSOR: 2, Axis.PIPELINE: 3, Axis.DATA: 4}
    assert layout_degrees(ParallelConfig(tensor=2, pipeline=3, data=4, order=order), 24) == degrees


@pytest.mark.parametrize(
    ("parallel", "sentence"),
    [
        (
            ParallelConfig(tensor=3),
            r"^parallel\.tensor \(3\) times .* is 3, .* 8 ranks; "
            r"start it with a multiple of 3 ranks \(without a launcher: --nproc 3\)$",
        ),
        (
            ParallelConfig(tensor=4, pipeline=4),
            r"\(4\) is 16, .* 8 ranks; start it with a multiple of 16 ranks \(without a launcher: --nproc 16\)$",
        ),
        (
            ParallelConfig(tensor=2, data=2),
            r"is 2, times parallel\.tensor \(2\) .* run has 8 ranks; set parallel\.data=auto",
        ),
        (
            ParallelConfig(tensor=3, data=2),
            r"is 2, times parallel\.tensor \(3\) .* 8 ranks; start it with 6 ranks \(without a launcher: --nproc 6\)$",
        ),
    ],
)
def test_degrees_that_do_not_fit(parallel: ParallelConfig, sentence: str) -> None:
    with pytest.raises(BadInputError, match=sentence):
        layout_degrees(parallel, 8)


def sites(*nodes: int, speeds: tuple[float | None, ...] = (), **extra: Any) -> Cluster:
    """Return clusters with these numbers of nodes, of 2 ranks each."""
    clusters = [
        {"name": f"c{index}", "nodes": count, "speed": (speeds or (None,) * len(nodes))[index]}
        for index, count in enumerate(nodes)
    ]
    return load_cluster({"node": {"ranks": 2}, "clusters": clusters, **extra})


def mesh(world: int, tensor: int = 1, pipeline: int = 1, order: Order = HOLMES) -> Layout:
    return Layout(layout_degrees(ParallelConfig(tensor=tensor, pipeline=pipeline, order=order), world))


def test_clusters_of_ranks() -> None:
    assert [cluster_of(sites(2, 1, 3), rank) for rank in range(12)] == [0] * 4 + [1] * 2 + [2] * 6
    assert {cluster_of(load_cluster("p4d"), rank) for rank in range(64)} == {0}
    assert {cluster_of(load_cluster({"node": {"ranks": 2}}), rank) for rank in range(8)} == {0}


@pytest.mark.parametrize("nodes", [(2, 1), (1, 2), (2, 4), (3, 2, 1), (2, 2), (1, 1)])
def test_the_tier_of_two_ranks_is_where_they_are(nodes: tuple[int, ...]) -> None:
    cluster, world = sites(*nodes, between=BETWEEN), 2 * sum(nodes)
    links = tiers(cluster, world, 2)
    for one in range(world):
        for other in range(one + 1, world):
            # A node that is a cluster has the cluster's name.
            near = "node" if any(tier.name == "node" for tier in links) else "cluster"
            expected = near if node_of(cluster, one) == node_of(cluster, other) else "cluster"
            if cluster_of(cluster, one) != cluster_of(cluster, other):
                expected = "all"
            assert tier_between(links, one, other) == expected, (one, other)


def test_clusters_of_unequal_size_along_an_axis() -> None:
    """Levels take the greatest common divisor, of which all aligned groups are inside a cluster."""
    links = tiers(sites(4, 2), 12, 2)
    assert [(tier.name, tier.ranks, tier.sizes) for tier in links] == [
        ("node", 2, ()),
        ("cluster", 4, (8, 4)),
        ("all", 12, ()),
    ]
    found = axis_tiers(links, mesh(12, tensor=2), Axis.DATA)
    assert found == (Tier("node", 1), Tier("cluster", 2), Tier("all", 6))
    assert [tier_ranks(tiers(sites(2, 1), 6, 2), name) for name in ("node", "cluster", "all")] == [2, 2, 6]


def test_speeds_of_stages() -> None:
    assert stage_speeds(None, mesh(8, pipeline=2)) is None
    assert stage_speeds(sites(2, 2), mesh(8, pipeline=2)) is None
    unlike = sites(2, 2, speeds=(None, 0.5))
    assert stage_speeds(unlike, mesh(8, pipeline=2)) == [1.0, 0.5]
    assert stage_speeds(unlike, mesh(8, pipeline=4, tensor=2)) == [1.0, 1.0, 0.5, 0.5]
    # Each stage has ranks of both clusters, and waits for the slower ranks.
    assert stage_speeds(unlike, mesh(8, pipeline=2, order="data-pipeline-tensor")) == [0.5, 0.5]
    assert stage_speeds(sites(1, 1, 1, speeds=(1.5, 1.0, 3)), mesh(6, pipeline=3)) == [1.5, 1.0, 3.0]


@pytest.mark.parametrize("world", [2**17 + 1, 10**18, 10**300])
def test_more_ranks_than_anybody_has(world: int) -> None:
    with pytest.raises(BadInputError, match="expected at most 131,072"):
        layout_degrees(ParallelConfig(), world)


@pytest.mark.parametrize("speed", [0.0, -1.0, "fast"])
def test_speeds_that_are_none(speed: Any) -> None:
    with pytest.raises(BadInputError, match=rf"^clusters\[0\]\.speed is {speed}; expected .* number"):
        sites(1, speeds=(speed,))


BETWEEN = {"interface": "eth0", "bandwidth": "25Gbit/s"}


def test_what_crosses_is_told_with_its_remedy() -> None:
    two = sites(2, 2, between=BETWEEN)
    (data,) = placement_advice(two, mesh(8))
    assert data.startswith("data-parallel groups cross the clusters c0 and c1, so gradients go")
    assert data.endswith("at 25Gbit/s; set parallel.pipeline to 2 to have each stage inside one cluster")
    assert placement_advice(two, mesh(8, pipeline=2)) == []
    assert placement_advice(two, mesh(8, pipeline=4, tensor=2)) == []
    (order,) = placement_advice(two, mesh(8, pipeline=2, order="data-pipeline-tensor"))
    assert "; set parallel.order to pipeline-data-tensor to have" in order
    # The advice keeps 4 stages, although 2 would do.
    (order,) = placement_advice(two, mesh(8, pipeline=4, order="data-pipeline-tensor"))
    assert "; set parallel.order to pipeline-data-tensor to have" in order
    (both,) = placement_advice(sites(2, 1, between=BETWEEN), mesh(6, pipeline=2, order="data-pipeline-tensor"))
    assert "; set parallel.pipeline to 3 and parallel.order to pipeline-data-tensor to have" in both
    (three,) = placement_advice(sites(1, 1, 1, between=BETWEEN), mesh(6))
    assert "clusters c0 and c1 and c2, " in three
    tensor, _ = placement_advice(two, mesh(8, tensor=4))
    assert tensor.startswith("parallel.tensor is 4 and a node has 2 ranks")
    assert "set parallel.tensor to a divisor of 2 " in tensor


def test_nothing_is_told_where_nothing_is_to_gain() -> None:
    assert placement_advice(None, mesh(8, tensor=4)) == []
    # The clusters are on one network, so the description does not say that links between them are slower.
    assert placement_advice(sites(2, 2), mesh(8)) == []
    assert placement_advice(load_cluster("p4d"), mesh(64, tensor=8)) == []


@pytest.mark.parametrize("nodes", [(1, 1), (2, 1), (2, 4), (1, 1, 1), (2, 1, 3)])
def test_remedies_work(nodes: tuple[int, ...]) -> None:
    cluster, world = sites(*nodes, between=BETWEEN), 2 * sum(nodes)
    for layout in meshes(world):
        inside = all(
            cluster_of(cluster, group[0]) == cluster_of(cluster, group[-1]) for group in layout.groups(Axis.DATA)
        )
        advice = [sentence for sentence in placement_advice(cluster, layout) if sentence.startswith("data")]
        assert bool(advice) != inside
        for sentence in advice:
            words = sentence.split()
            stages = int(words[words.index("parallel.pipeline") + 2]) if "parallel.pipeline" in words else None
            kept = "-".join(axis.value for axis in layout.degrees)
            (order,) = (each for each in ORDERS if each == (HOLMES if "parallel.order" in words else kept))
            tensor, pipeline = layout.degrees[Axis.TENSOR], stages or layout.degrees[Axis.PIPELINE]
            assert not [
                each for each in placement_advice(cluster, mesh(world, tensor, pipeline, order)) if "data" in each[:4]
            ]
