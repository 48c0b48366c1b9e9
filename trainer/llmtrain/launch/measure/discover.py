"""Discover what to measure without a description: each machine's network cards, CPU sockets and networks.

Cards reach each other if their addresses are on one network. A network of all nodes joins the clusters; a network of
some of the nodes makes those nodes a cluster. No torch in here.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from ipaddress import ip_interface
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
from llmtrain_data import units

from llmtrain.cluster.control_groups import cpu_quota
from llmtrain.cluster.description import Cluster, Host, Nic, Node, NodeGroup
from llmtrain.cluster.memory import machine_memory, usable_memory
from llmtrain.cluster.sockets import SYS, Cores, cores_by_socket, device_socket, file_text, own_socket
from llmtrain.comm.cores import bind
from llmtrain.errors import BadInputError

# The kernel's number for InfiniBand in a card's file `type`.
_INFINIBAND = "32"
_BEST_FIRST = ("infiniband", "roce", "ethernet")


@dataclass(frozen=True)
class Card:
    """A network card as its machine sees it. network: the network that its address is in. speed: Mbit/s that it claims,
    or 0. socket: the CPU socket that it is attached to; None if unknown.
    """

    interface: str
    kind: str
    address: str
    network: str
    speed: int = 0
    socket: int | None = None


@dataclass(frozen=True)
class Machine:
    """A rank's view of its machine. sockets: number of CPU sockets. socket: the one that this rank runs on. cores:
    numbers of those that it could use before it was pinned to the socket."""

    cards: tuple[Card, ...]
    sockets: int
    socket: int
    cores: tuple[int, ...]

    def as_data(self) -> dict[str, Any]:
        """Return the machine as plain data."""
        return asdict(self)

    @staticmethod
    def of(data: Mapping[str, Any]) -> "Machine":
        """Return the machine that `as_data` gave as plain data."""
        return Machine(
            tuple(Card(**card) for card in data["cards"]), data["sockets"], data["socket"], tuple(data["cores"])
        )


def this_machine(local_rank: int, local_ranks: int, accelerator: str | None = None, sys: Path = SYS) -> Machine:
    """Examine this machine, and pin this rank to one CPU socket if it may run on several.

    accelerator: PCI address of the rank's accelerator, whose socket it takes; without one, neighbouring ranks share a
    socket. sys: the folder of the kernel's files.
    """
    cores, allowed = cores_by_socket(sys), frozenset(os.sched_getaffinity(0))
    near = device_socket(sys / "bus/pci/devices" / accelerator, cores) if accelerator else None
    mine = own_socket(cores, allowed, (local_rank, local_ranks), near)
    if mine is not None:
        bind(cores[mine], allowed)
    return Machine(tuple(_cards(cores, sys)), max(1, len(cores)), mine or 0, tuple(sorted(allowed)))


def discovered(machines: Sequence[Machine], ranks_per_node: int, one_machine: bool) -> Cluster:
    """Return a description of the ranks' nodes: clusters, their cards and the card between them, without speeds. The
    cores are those that the first node's ranks may use at once.

    machines: each rank's view. one_machine: whether all ranks are on one machine, so that they use no card. Raises
    BadInputError if the nodes of a network are not consecutive.
    """
    memory = units.size(usable_memory(machine_memory()))
    cores = {core for machine in machines[:ranks_per_node] for core in machine.cores}
    usable = max(1, int(min(len(cores), cpu_quota().cores)))
    host = Host(memory=memory, cores=usable, sockets=machines[0].sockets)
    node = Node(ranks=ranks_per_node, host=host)
    if one_machine:
        return Cluster(node=node)
    clusters, between = networks(machines[::ranks_per_node])
    return Cluster(node=node, clusters=clusters, between=between)


def networks(machines: Sequence[Machine]) -> tuple[tuple[NodeGroup, ...], Nic | None]:
    """Return the clusters that the nodes form, and the card for traffic between clusters."""
    by_network = [_usable(machine, machines) for machine in machines]
    common = reduce(lambda one, other: one & other, (set(cards) for cards in by_network))
    # A network of a single node makes no cluster.
    counted = [name for cards in by_network for name in cards]
    own = [frozenset(name for name in cards if name not in common and counted.count(name) > 1) for cards in by_network]
    runs = [(names, len(list(same))) for names, same in groupby(own)]
    if len({names for names, _ in runs}) < len(runs):
        raise BadInputError(
            "nodes that share a network are not next to each other among the ranks, so they are no cluster; start the "
            "ranks in the order of their networks, or describe the cluster with --cluster"
        )
    groups, first = [], 0
    for index, (names, nodes) in enumerate(runs):
        cards = _best([card for network, card in by_network[first].items() if network in (names or common)])
        name = "cluster" if len(runs) == 1 else f"cluster{index}"
        groups.append(NodeGroup(name=name, nodes=nodes, **_as_keys(cards or (Nic(),))))
        first += nodes
    joining = sorted((by_network[0][name] for name in common), key=lambda card: -card.speed)
    if len({group.cards[0].kind for group in groups}) > 1 and not joining:
        raise BadInputError(
            "no network joins all nodes under one name of its interface; describe the clusters with --cluster. Without "
            "an interface there, each node takes that of its NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        )
    return tuple(groups), _best(joining)[0] if len(runs) > 1 and joining else None


def _as_keys(cards: tuple[Nic, ...]) -> dict[str, Any]:
    return {"nics": cards} if len(cards) > 1 else {"nic": cards[0]}


def _usable(machine: Machine, machines: Sequence[Machine]) -> dict[str, Card]:
    """Return a machine's cards by network, if their addresses differ and their interfaces have one name everywhere."""
    found = {}
    for card in machine.cards:
        peers = [other for each in machines for other in each.cards if other.network == card.network]
        # Networks of containers have the same addresses on every machine.
        distinct = len({other.address for other in peers}) == len(peers)
        if distinct and {other.interface for other in peers} == {card.interface}:
            found[card.network] = card
    return found


def _best(cards: Sequence[Card]) -> tuple[Nic, ...]:
    """Return the cards of the best kind among them."""
    kind = min((card.kind for card in cards), key=_BEST_FIRST.index, default="")
    return tuple(Nic(kind=kind, interface=card.interface) for card in cards if card.kind == kind)


def _cards(cores: Cores, sys: Path) -> list[Card]:
    found, state = [], psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        folder = sys / "class/net" / name
        own = next((each for each in addresses if each.family == socket.AF_INET and each.netmask), None)
        up = name in state and state[name].isup
        if own is None or not up or ip_interface(own.address).is_loopback or (folder / "bridge").exists():
            continue
        network = str(ip_interface(f"{own.address}/{own.netmask}").network)
        found.append(
            Card(name, _kind(folder), own.address, network, state[name].speed, device_socket(folder / "device", cores))
        )
    return found


def _kind(folder: Path) -> str:
    if file_text(folder / "type") == _INFINIBAND:
        return "infiniband"
    return "roce" if (folder / "device/infiniband").exists() else "ethernet"
