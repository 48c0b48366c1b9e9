"""Cluster descriptions: how they are read, which are refused, and the tiers of links that follow."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmtrain.cluster.description import Cluster
from llmtrain.cluster.load import load_cluster, shipped_clusters
from llmtrain.cluster.quantity import quantity
from llmtrain.cluster.tiers import Tier, tier_ranks, tiers
from llmtrain.errors import BadInputError

GBIT = 1e9 / 8


def two_clusters(first: int, second: int, **extra: Any) -> Cluster:
    clusters = [
        {"name": "a", "nodes": first, "nic": {"kind": "infiniband", "bandwidth": "200Gbit/s", "latency": "2us"}},
        {"name": "b", "nodes": second, "nic": {"kind": "infiniband", "bandwidth": "100Gbit/s", "latency": "4us"}},
    ]
    return load_cluster({"node": {"ranks": 4}, "clusters": clusters, **extra})


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("200Gbit/s", "byte/s", 25e9),
        ("200mbit", "byte/s", 25e6),
        ("300GB/s", "byte/s", 300e9),
        ("2.0TB/s", "byte/s", 2e12),
        ("1e3 B/s", "byte/s", 1e3),
        ("3us", "s", 3e-6),
        ("0s", "s", 0.0),
        ("80GB", "byte", 80e9),
        ("512GiB", "byte", 512 * 2**30),
        ("312TFLOP/s", "FLOP/s", 312e12),
    ],
)
def test_quantities(text: str, unit: Any, value: float) -> None:
    assert quantity(text, unit) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        *((text, "byte/s") for text in ("200", "200GB", "3us", "-1GB/s", "0mbit")),
        *((text, "s") for text in ("3Ms", "3mB", "3", "")),
        *((text, "byte") for text in ("80GB/s", "GB", "1e999GB")),
    ],
)
def test_wrong_units_are_refused(text: str, unit: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a .* such as"):
        quantity(text, unit)


@pytest.mark.parametrize("name", shipped_clusters())
def test_shipped_descriptions(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert load_cluster(f"clusters/{name}.yaml") == cluster
    world = sum(group.nodes or 2 for group in cluster.clusters) * cluster.node.ranks
    found = tiers(cluster, world, cluster.node.ranks)
    assert found[-1].ranks == world
    # One rank has no links.
    assert (found[-1].bandwidth is not None) == (world > 1)


def test_figures_of_the_papers() -> None:
    assert tiers(load_cluster("frontier"), 384, 8) == (
        Tier("die", 2, 200e9),
        Tier("node", 8, 50e9),
        Tier("all", 384, 800 * GBIT, None, ("cluster",)),
    )
    assert tiers(load_cluster("two-sites"), 32, 8) == (
        Tier("node", 8, 300e9),
        Tier("cluster", 16, 200 * GBIT),
        Tier("all", 32, 25 * GBIT),
    )


def test_the_smallest_description() -> None:
    cluster = load_cluster({"node": {"ranks": 2}})
    assert tiers(cluster, 6, 6) == (Tier("node", 2), Tier("all", 6, aliases=("cluster",)))


def test_without_a_description() -> None:
    assert tiers(None, 8, 4) == (Tier("node", 4), Tier("all", 8, aliases=("cluster",)))
    assert tiers(None, 4, 4) == (Tier("all", 4, aliases=("node", "cluster")),)
    # On machines of 4 and 2 ranks, every aligned pair is on one machine, whichever rank asks.
    assert tiers(None, 6, 4) == tiers(None, 6, 2) == (Tier("node", 2), Tier("all", 6, aliases=("cluster",)))


def test_names_of_tiers_as_large_as_others() -> None:
    frontier = load_cluster("frontier")
    names = ("die", "node", "cluster", "all")
    assert [tier_ranks(tiers(frontier, 16, 8), name) for name in names] == [2, 8, 16, 16]
    assert [tier_ranks(tiers(frontier, 8, 8), name) for name in names] == [2, 8, 8, 8]
    assert [tier_ranks(tiers(frontier, 4, 4), name) for name in names] == [2, 4, 4, 4]
    assert [tier_ranks(tiers(frontier, 1, 1), name) for name in names] == [1, 1, 1, 1]
    assert tiers(frontier, 8, 8)[-1].bandwidth == 50e9
    with pytest.raises(BadInputError, match=r"rack is no tier .* die, node, cluster, all"):
        tier_ranks(tiers(frontier, 16, 8), "rack")


def test_several_clusters() -> None:
    figures = (100 * GBIT, 4e-6)
    assert tiers(two_clusters(2, 2), 16, 4)[1:] == (Tier("cluster", 8, *figures), Tier("all", 16, *figures))
    joined = two_clusters(4, 2, between={"bandwidth": "25Gbit/s", "latency": "50us"})
    cluster, everything = tiers(joined, 24, 4)[1:]
    assert cluster == Tier("cluster", 8, *figures, sizes=(16, 8))
    assert everything == Tier("all", 24, 25 * GBIT, 50e-6)
    assert tiers(two_clusters(1, 1), 8, 4)[0] == Tier("cluster", 4, aliases=("node",))


@given(st.lists(st.integers(1, 3), max_size=3), st.integers(1, 4), st.integers(1, 4))
def test_tiers_nest(factors: list[int], nodes: int, per_machine: int) -> None:
    sizes = [2]
    for factor in factors:
        sizes.append(sizes[-1] * (factor + 1))
    inner = [{"name": f"t{size}", "ranks": size} for size in sizes]
    cluster = load_cluster({"node": {"ranks": sizes[-1] * 2, "tiers": inner}})
    world = cluster.node.ranks * nodes
    found = tiers(cluster, world, cluster.node.ranks * per_machine)
    assert found[-1].name == "all"
    assert found[-1].ranks == world
    assert all(small.ranks < large.ranks and large.ranks % small.ranks == 0 for small, large in pairwise(found))
    assert [tier_ranks(found, f"t{size}") for size in sizes] == sizes


@pytest.mark.parametrize(
    ("cluster", "world", "per_machine", "sentence"),
    [
        (two_clusters(2, 1), 16, 4, r"has 2 \+ 1 nodes of 4 ranks, but the run has 16 ranks; start it with 12$"),
        (load_cluster({"node": {"ranks": 4}, "clusters": [{"name": "a", "nodes": 2}]}), 12, 4, "at most 8$"),
        (
            load_cluster({"node": {"ranks": 4}}),
            6,
            8,
            "tier node has 4 ranks, but the run has 6; set cluster.node.ranks .* multiple of 4$",
        ),
        (load_cluster({"node": {"ranks": 4}}), 4, 2, "node.ranks is 4, but the run was started with 2 ranks"),
        (load_cluster("frontier"), 3, 3, "tier die has 2 ranks, but the run has 3"),
    ],
)
def test_worlds_that_do_not_fit(cluster: Cluster, world: int, per_machine: int, sentence: str) -> None:
    with pytest.raises(BadInputError, match=sentence):
        tiers(cluster, world, per_machine)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({}, "^node is missing"),
        ({"node": {"rank": 2}}, r"^node.rank is no key of a cluster; did you mean node.ranks\?"),
        ({"ranks": 2}, r"^ranks is no key of a cluster; did you mean node.ranks\?"),
        ({"node": {"ranks": "two"}}, "^node.ranks is two; expected a valid integer"),
        ({"node": {"ranks": 0}}, "^node.ranks is 0; expected a number greater than or equal to 1"),
        ({"node": {"ranks": 8, "tiers": [{"name": "die", "ranks": 3}]}}, r"^node.tiers.die.ranks is 3; expected .* 8"),
        ({"node": {"ranks": 8, "tiers": [{"name": "node", "ranks": 4}]}}, "is called node"),
        ({"node": {"ranks": 8, "tiers": [{"name": "nvlink", "ranks": 8}]}}, "is called node"),
        ({"node": {"ranks": 8, "tiers": [{"name": "all", "ranks": 8}]}}, r"^node.tiers\[0\].name is 'all'"),
        (
            {"node": {"ranks": 8, "tiers": [{"name": "a", "ranks": 4}, {"name": "b", "ranks": 2}]}},
            "tiers.b.ranks is 2; expected a multiple of the 4",
        ),
        (
            {"node": {"ranks": 1}, "between": {"bandwidth": "25 gigabit"}},
            "^between.bandwidth is '25 gigabit'; expected a rate such as",
        ),
        (
            {"node": {"ranks": 1}, "between": {"bandwidth": 25}},
            "^between.bandwidth is 25; expected a text: .* with its unit",
        ),
        ({"node": {"ranks": 1}, "between": {"latency": "3GB"}}, "^between.latency is '3GB'; expected a time such as"),
        (
            {"node": {"ranks": 1}, "accelerator": {"peak": {"tf32": "1FLOP/s"}}},
            "^accelerator.peak.tf32 is no compute dtype",
        ),
        (
            {"node": {"ranks": 1}, "clusters": [{"name": "a", "nic": {}, "nics": [{}]}]},
            r"^clusters\[0\].nics and nic are both given",
        ),
        (
            {"node": {"ranks": 1}, "clusters": [{"name": "a", "nics": [{"kind": "roce"}, {"kind": "efa"}]}]},
            "nics are of the kinds efa, roce",
        ),
        ({"node": {"ranks": 1}, "clusters": [{"name": "a"}, {"name": "b"}]}, r"^clusters\[0\].nodes is missing"),
        (
            {"node": {"ranks": 1}, "clusters": [{"name": "a", "nodes": 1}, {"name": "a", "nodes": 1}]},
            r"^clusters\[1\].name is a",
        ),
        (
            {
                "node": {"ranks": 1},
                "clusters": [{"name": n, "nodes": 1, "nic": {"kind": k}} for n, k in (("a", "roce"), ("b", "efa"))],
            },
            "^between is missing; the clusters' cards are of the kinds efa and roce",
        ),
        ({"node": {"ranks": 1}, "name": object()}, "not plain YAML"),
    ],
)
def test_bad_descriptions(data: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInputError, match=sentence):
        load_cluster(data)


def test_where_a_description_comes_from(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"no description of a cluster frontir; did you mean frontier\?"):
        load_cluster("frontir")
    mine = tmp_path / "mine.yaml"
    mine.write_text("node: {ranks: 2}\n")
    assert load_cluster(mine).name == "mine"
    with pytest.raises(BadInputError, match=r"^cluster\.node\.rank is no key"):
        load_cluster({"node": {"rank": 2}}, key="cluster")
    for text, sentence in (
        ("node: {ranks: !!python/object/apply:os.getpid []}\n", "could not determine a constructor"),
        ("- a\n", "holds a list"),
        ("node: {rank: 2}\n", r"mine\.yaml: node\.rank is no key"),
    ):
        mine.write_text(text)
        with pytest.raises(BadInputError, match=sentence):
            load_cluster(mine)
