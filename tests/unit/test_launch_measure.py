"""`bench comm`: the ranks that it measures between, the cluster that it discovers, and the file that it writes."""

import math
import os
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from socket import AF_INET
from typing import Any

import psutil
import pytest
from llmtrain.cluster.control_groups import Quota
from llmtrain.cluster.description import Cluster
from llmtrain.cluster.load import load_cluster
from llmtrain.comm import device
from llmtrain.errors import BadInputError
from llmtrain.launch import bench_comm
from llmtrain.launch.measure import discover
from llmtrain.launch.measure.discover import Card, Machine, discovered, networks, this_machine
from llmtrain.launch.measure.links import Link, links, socket_links
from llmtrain.launch.measure.result import Measured, Timing, as_data, described, without_slow_cards

UNEVEN: dict[str, Any] = {
    "node": {"ranks": 2},
    "clusters": [
        {"name": "a", "nodes": 1, "nic": {"kind": "infiniband", "interface": "ib0", "bandwidth": "400mbit"}},
        {"name": "b", "nodes": 3, "nic": {"kind": "roce", "interface": "roce0"}},
    ],
    "between": {"interface": "eth0"},
}


def found(link: Link, rate: float = 1e6, latency: float = 1e-4) -> Measured:
    return Measured(link, latency, rate, (Timing("all-reduce", 1024, 1e-3),))


@pytest.mark.parametrize(("seen", "expected"), [(1, "bus 0"), (4, "bus 3"), (0, None)])
def test_a_rank_is_near_the_gpu_that_it_takes(seen: int, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only one that it sees, or that of its place on the machine."""
    monkeypatch.setattr(device, "gpu_count", lambda: seen)
    monkeypatch.setattr(device, "gpus", lambda: [device.Gpu("A", 1, "", f"bus {place}") for place in range(seen)])
    assert bench_comm._accelerator_address(3) == expected


def test_ranks_of_a_discovered_cluster_connect_over_the_network_of_the_environment() -> None:
    """On GPUs, and over another one only where it joins several clusters. gloo takes one network in any case."""
    one, two = load_cluster("frontier"), load_cluster(UNEVEN)
    pairs = ((None, one), (None, two), (one, one))
    assert [bench_comm._to_connect(given, found, True) for given, found in pairs] == [None, two, one]
    assert [bench_comm._to_connect(given, found, False) for given, found in pairs] == [one, two, one]


def test_every_tier_and_card_of_a_node_is_measured() -> None:
    frontier = load_cluster("frontier")
    measured = links(frontier, 16, one_machine=False, each_card=True)
    assert [(link.tier, link.card, link.sharing) for link in measured] == [
        ("die", None, 1), ("node", None, 1), *(("cluster", card, 8) for card in (0, 1, 2, 3, None)),
    ]  # fmt: skip
    die, node, *cards = (link.groups for link in measured)
    assert die == tuple((rank, rank + 1) for rank in range(0, 16, 2))
    # Ranks that differ only in their die of the pair.
    assert node == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    assert set(cards) == {tuple((rank, rank + 8) for rank in range(8))}
    interfaces = [[link.nic(frontier, rank).interface for rank in range(8)] for link in measured[2:]]  # type: ignore[union-attr]
    assert interfaces[1] == ["hsn1"] * 8
    assert interfaces[4] == ["hsn0", "hsn0", "hsn1", "hsn1", "hsn2", "hsn2", "hsn3", "hsn3"]


def test_clusters_are_measured_one_by_one_and_between() -> None:
    cluster = load_cluster(UNEVEN)
    node, own, between = links(cluster, 8, one_machine=False, each_card=True)
    assert node.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    # A single node has no peer on its own card's network.
    assert (own.cluster, own.groups) == (1, ((2, 4, 6), (3, 5, 7)))
    assert between.groups == ((0, 2), (1, 3))
    assert [link.nic(cluster, 2) and link.nic(cluster, 2).interface for link in (node, own, between)] == [  # type: ignore[union-attr]
        None, "roce0", "eth0",
    ]  # fmt: skip
    assert own.nic(cluster, 0) is None


def test_one_machine_has_no_use_for_cards() -> None:
    assert [link.tier for link in links(load_cluster("lab-2x2"), 4, one_machine=True, each_card=True)] == ["node"]
    assert [link.groups for link in links(load_cluster("p4d"), 3, one_machine=True, each_card=True)] == [((0, 1, 2),)]


def test_a_rate_is_what_all_ranks_at_a_card_send() -> None:
    cluster = load_cluster(UNEVEN)
    node, own, between = links(cluster, 8, one_machine=False, each_card=True)
    written_as = described(cluster, [found(node, 2e9, 3e-6), found(own, 12.5e6), found(between, 3.125e6, 5e-3)])
    data = as_data(written_as)
    assert data["node"] == {
        "ranks": 2,
        "tiers": [{"name": "node", "ranks": 2, "bandwidth": "2.00 GB/s", "latency": "3.00 us"}],
    }
    assert data["clusters"][0] == UNEVEN["clusters"][0]
    nic = {"kind": "roce", "interface": "roce0", "bandwidth": "200 Mbit/s", "latency": "100 us"}
    assert data["clusters"][1] == {"name": "b", "nodes": 3, "nic": nic}
    assert data["between"] == {
        "kind": "ethernet",
        "interface": "eth0",
        "bandwidth": "50.0 Mbit/s",
        "latency": "5.00 ms",
    }
    assert load_cluster(data) == written_as


def test_cards_that_cannot_be_told_apart_share_what_they_do_together() -> None:
    cluster = load_cluster("frontier")
    together = links(cluster, 16, one_machine=False, each_card=False)[-1]
    cards = described(cluster, [found(together, 1e9)]).clusters[0].cards
    assert [card.bandwidth for card in cards] == ["16.0 Gbit/s"] * 4


def test_messages_between_given_processors_are_not_the_link() -> None:
    cluster = load_cluster(UNEVEN)
    own = links(cluster, 8, one_machine=False, each_card=True)[1]
    near = found(replace(own, sockets="same"), 5e7)
    assert described(cluster, [found(own, 1e6), near]) == described(cluster, [found(own, 1e6)])


def test_who_is_on_which_processor() -> None:
    cluster = load_cluster({"node": {"ranks": 4}, "clusters": [{"name": "c", "nodes": 2, "nic": {}}]})
    node, card = links(cluster, 8, one_machine=False, each_card=True)
    sockets = [0, 0, 1, 1] * 2
    same, cross = socket_links(node, sockets, None)
    assert (same.groups, cross.groups) == (((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 2), (1, 3), (4, 6), (5, 7)))
    same, cross = socket_links(card, sockets, 1)
    assert (same.groups, cross.groups, same.sharing) == (((2, 6), (3, 7)), ((0, 4), (1, 5)), 2)
    assert socket_links(card, sockets, None) == []
    assert socket_links(node, [0] * 8, None) == []


def machine(*cards: tuple[str, str, str], kind: str = "ethernet") -> Machine:
    return Machine(tuple(Card(name, kind, address, network) for name, address, network in cards), 1, 0, (0, 1))


def test_networks_of_some_nodes_make_clusters() -> None:
    machines = [
        machine(("ib0", f"10.0.0.{node}", "10.0.0.0/16"), ("eth0", f"10.2.0.{node}", "10.2.0.0/16")) for node in (1, 2)
    ]
    machines += [
        machine(("roce0", f"10.1.0.{node}", "10.1.0.0/16"), ("eth0", f"10.2.0.{node}", "10.2.0.0/16"))
        for node in (3, 4, 5)
    ]
    clusters, between = networks(machines)
    assert [(each.nodes, [card.interface for card in each.cards]) for each in clusters] == [
        (2, ["ib0"]),
        (3, ["roce0"]),
    ]
    assert between is not None
    assert between.interface == "eth0"
    with pytest.raises(BadInputError, match="not next to each other among the ranks"):
        networks([machines[0], machines[2], machines[1], machines[3]])


def test_clusters_of_different_kinds_that_no_interface_joins() -> None:
    def nodes(kind: str, own: int, joins: str) -> list[Machine]:
        cards = [(("fast", f"10.{own}.0.{node}", f"10.{own}.0.0/16"), node) for node in (1, 2)]
        return [machine(card, (joins, f"10.9.{own}.{node}", "10.9.0.0/16"), kind=kind) for card, node in cards]

    named = [*nodes("infiniband", 0, "eno1"), *nodes("roce", 1, "eth0")]
    with pytest.raises(BadInputError, match="no network joins all nodes under one name of its interface"):
        networks(named)
    # Those of one kind may reach each other over routers.
    routed = [*nodes("roce", 0, "eno1"), *nodes("roce", 1, "eth0")]
    clusters, between = networks(routed)
    assert ([each.nodes for each in clusters], between) == ([2, 2], None)


def test_cards_that_join_nothing_are_left_out() -> None:
    inside = ("docker0", "172.17.0.1", "172.17.0.0/16")
    cards = [("eth0", "10.0.0.{}", "10.0.0.0/16"), ("eth1", "10.1.0.{}", "10.1.0.0/16"), inside]
    cards.append(("usb0", "10.9.{0}.1", "10.9.{0}.0/24"))
    machines = [
        machine(*((name, address.format(node), network.format(node)) for name, address, network in cards))
        for node in (1, 2)
    ]
    clusters, between = networks(machines)
    assert [[card.interface for card in each.cards] for each in clusters] == [["eth0", "eth1"]]
    assert between is None
    # The backend chooses a card by itself.
    (unknown,), _ = networks([machine(inside), machine(inside)])
    assert [card.interface for card in unknown.cards] == [None]
    assert discovered(machines, 4, one_machine=True).clusters == ()


def test_a_discovered_machine_leaves_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "machine_memory", lambda: 1000 * 2**30)
    host = discovered([machine()], 1, one_machine=True).node.host
    assert host is not None
    assert host.memory == "875 GiB"


@pytest.mark.parametrize(("quota", "cores"), [(math.inf, 6), (2.5, 2), (0.5, 1)])
def test_the_cores_of_a_node_are_those_of_its_ranks(quota: float, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm may give each rank cores of its own. Those of another node do not count."""
    monkeypatch.setattr(discover, "cpu_quota", lambda: Quota(quota))
    ranks = [Machine((), 1, 0, own) for own in ((0, 1, 2, 3), (2, 3, 4, 5), (6, 7))]
    host = discovered(ranks, 2, one_machine=True).node.host
    assert host is not None
    assert host.cores == cores


def test_slow_cards_are_for_something_else() -> None:
    clusters, _ = networks(
        [machine(*((f"eth{card}", f"10.{card}.0.{node}", f"10.{card}.0.0/16") for card in range(3))) for node in (1, 2)]
    )
    cluster = Cluster(node=load_cluster(UNEVEN).node, clusters=clusters)
    rates = (1e9, 1.25e8, 0.9e9)
    measured = [found(link, rates[link.card]) for link in links(cluster, 4, False, True)[1:] if link.card is not None]
    kept = without_slow_cards(described(cluster, measured)).clusters[0]
    assert [card.interface for card in kept.cards] == ["eth0", "eth2"]


def test_what_a_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for core, socket in ((0, 0), (1, 0), (2, 1), (3, 1)):
        folder = tmp_path / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{socket}\n")
    for name, files in {
        "ib0": {"type": "32", "device/local_cpulist": "2-3", "device/numa_node": "1"},
        "eth0": {"type": "1", "device/infiniband/mlx5_0": ""},
        "eth1": {"type": "1"},
        "docker0": {"type": "1", "bridge/forward_delay": ""},
    }.items():
        for file, text in files.items():
            path = tmp_path / "class/net" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    address = namedtuple("address", "family address netmask")
    state = namedtuple("state", "isup speed")
    names = ["ib0", "eth0", "eth1", "docker0"]
    addresses = {name: [address(AF_INET, f"10.{place}.0.7", "255.255.0.0")] for place, name in enumerate(names)}
    monkeypatch.setattr(
        psutil, "net_if_addrs", lambda: {**addresses, "lo": [address(AF_INET, "127.0.0.1", "255.0.0.0")]}
    )
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: state(True, 100) for name in [*names, "lo"]})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    bound: list[frozenset[int]] = []
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda thread, cores: bound.append(cores) if thread == os.getpid() else None
    )

    ranks = [this_machine(rank, 4, sys=tmp_path) for rank in range(4)]
    assert [each.socket for each in ranks] == [0, 0, 1, 1]
    assert bound == [{0, 1}, {0, 1}, {2, 3}, {2, 3}]
    assert [(card.interface, card.kind, card.socket) for card in ranks[0].cards] == [
        ("ib0", "infiniband", 1), ("eth0", "roce", None), ("eth1", "ethernet", None),
    ]  # fmt: skip
    assert ranks[0].cards[0].network == "10.0.0.0/16"
    assert Machine.of(ranks[3].as_data()) == ranks[3]
    # A rank that its launcher has pinned stays there.
    assert [each.cores for each in ranks] == [(0, 1, 2, 3)] * 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert this_machine(0, 4, sys=tmp_path).socket == 1
    assert len(bound) == 4
