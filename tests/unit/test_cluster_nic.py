"""The network card that a process group uses, from the places of its ranks."""

import os
from itertools import product
from typing import Any

import pytest
from llmtrain.cluster.description import Cluster, Nic
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.load import load_cluster
from llmtrain.cluster.nic import card_of, nccl_net
from llmtrain.cluster.parallel import ParallelConfig
from llmtrain.cluster.topology import clusters_of, layout_degrees, nodes_of
from llmtrain.comm.groups import gloo_over
from llmtrain.errors import BadInputError

ETHERNET = {"kind": "ethernet", "interface": "eth0"}


def sites(*kinds: str, nodes: int = 2, ranks: int = 2, cards: int = 1, between: Any = ETHERNET) -> Cluster:
    clusters = [
        {
            "name": f"c{site}",
            "nodes": nodes,
            "nics": [{"kind": kind, "interface": f"{kind}{card}"} for card in range(cards)],
        }
        for site, kind in enumerate(kinds)
    ]
    return load_cluster({"node": {"ranks": ranks}, "clusters": clusters, "between": between})


def mesh(world: int, tensor: int, pipeline: int) -> Layout:
    return Layout(layout_degrees(ParallelConfig(tensor=tensor, pipeline=pipeline), world))


def interface(cluster: Cluster | None, groups: Any, rank: int) -> str | None:
    card = card_of(cluster, groups, rank)
    return card.interface if card else None


@pytest.mark.parametrize("kinds", [("infiniband", "roce"), ("roce", "roce"), ("infiniband", "roce", "roce")])
def test_groups_of_every_mesh(kinds: tuple[str, ...]) -> None:
    cluster, world = sites(*kinds), 4 * len(kinds)
    for tensor, pipeline in product((1, 2, 4), (1, 2, 3, 4, 6)):
        if world % (tensor * pipeline):
            continue
        layout = mesh(world, tensor, pipeline)
        for axis in Axis:
            for group in layout.groups(axis):
                found = {interface(cluster, layout.groups(axis), rank) for rank in group}
                if len(nodes_of(cluster, group)) == 1:
                    assert found == {None}
                elif len(clusters_of(cluster, group)) == 1:
                    assert found == {f"{kinds[clusters_of(cluster, group)[0]]}0"}
                else:
                    assert found == {"eth0"}


def test_holmes_placement() -> None:
    """Tensor inside the node, data on the cluster's own card, pipeline on Ethernet (figure 3)."""
    cluster, layout = sites("infiniband", "roce"), mesh(8, tensor=2, pipeline=2)
    cards = {axis: [interface(cluster, layout.groups(axis), rank) for rank in range(8)] for axis in Axis}
    assert cards[Axis.TENSOR] == [None] * 8
    assert cards[Axis.DATA] == ["infiniband0"] * 4 + ["roce0"] * 4
    assert cards[Axis.PIPELINE] == ["eth0"] * 8


def test_parallel_groups_share_out_the_cards() -> None:
    frontier = load_cluster("frontier")
    across = [[local, 8 + local, 16 + local] for local in range(8)]
    taken = ["hsn0", "hsn0", "hsn1", "hsn1", "hsn2", "hsn2", "hsn3", "hsn3"]
    assert [interface(frontier, across, rank) for rank in range(24)] == taken * 3
    halves = [[*range(first, 24, 2)] for first in range(2)]
    assert [interface(frontier, halves, rank) for rank in range(24)] == ["hsn0", "hsn2"] * 12
    assert interface(frontier, [range(24)], 13) == "hsn0"
    # A group inside a node names no card, and leaves all cards to the other groups.
    mixed = [[0, 1, 2, 3], [4, 12], [5, 13], [6, 14], [7, 15]]
    assert [interface(frontier, mixed, rank) for rank in (0, 4, 5, 6, 7, 12, 15)] == [
        *(None, "hsn0", "hsn1", "hsn2", "hsn3", "hsn0", "hsn3")
    ]


def test_one_network_for_all_clusters() -> None:
    cluster = load_cluster(
        {
            "node": {"ranks": 1},
            "clusters": [{"name": name, "nodes": 1, "nic": {"interface": name}} for name in ("ib0", "ib1")],
        }
    )
    assert [interface(cluster, [[0, 1]], rank) for rank in (0, 1)] == ["ib0", "ib1"]


def test_without_cards_nothing_is_chosen() -> None:
    groups = [[0, 2], [1, 3]]
    assert card_of(None, groups, 0) is None
    assert card_of(load_cluster({"node": {"ranks": 1}}), groups, 0) is None
    assert card_of(load_cluster({"node": {"ranks": 1}, "clusters": [{"name": "a"}]}), groups, 0) is None
    assert card_of(sites("roce"), groups, 9) is None


def test_networks_of_nccl() -> None:
    cluster = sites("infiniband", "roce")
    nets = [nccl_net(cluster, card_of(cluster, groups, 0)) for groups in ([[0, 1]], [[0, 2]], [[0, 4]])]
    assert nets == [None, "IB", "Socket"]
    # Two sites on InfiniBand that reach each other through it.
    joined = sites("infiniband", "infiniband", between={"kind": "infiniband", "interface": "ib1"})
    assert nccl_net(joined, card_of(joined, [[0, 4]], 0)) == "IB"
    # A card of an InfiniBand or RoCE kind that joins clusters whose own cards do not reach each other.
    apart = sites("infiniband", "roce", between={"kind": "roce", "interface": "eth0"})
    assert nccl_net(apart, card_of(apart, [[0, 4]], 0)) == "Socket"
    frontier = load_cluster("frontier")
    assert nccl_net(frontier, card_of(frontier, [[0, 8]], 0)) is None
    assert nccl_net(None, None) is None
    assert nccl_net(sites("ethernet"), Nic()) is None


def test_a_card_that_this_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    with (
        pytest.raises(BadInputError, match=r"the interface ib7, but this machine has .*lo"),
        gloo_over(Nic(interface="ib7")),
    ):
        pass
    with gloo_over(Nic(interface="lo")):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    with gloo_over(None), gloo_over(Nic()):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with gloo_over(Nic(interface="lo")):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
