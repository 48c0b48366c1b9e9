"""The description of an emulated cluster: nodes, their network cards and their networks. Pure data."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmtrain.cluster.description import Cluster, Nic, NodeGroup
from llmtrain.cluster.quantity import quantity
from llmtrain.errors import BadInputError

# Seconds. Messages on the machine itself take about 0.1 ms, so shorter latencies make no difference.
SHORTEST = 0.0005

# A valid Linux interface name.
_INTERFACE = re.compile(r"[^\s/:.][^\s/:]{0,14}")


@dataclass(frozen=True)
class Card:
    """A network card of one node. network: cards reach each other if they have the same network.

    rate: bytes per second in each direction; None: unshaped. latency: delay in seconds of what the card sends; jitter:
    random addition to it, up to this many seconds, without reordering.
    """

    interface: str
    network: str
    rate: float | None = None
    latency: float = 0.0
    jitter: float = 0.0


@dataclass(frozen=True)
class Spec:
    """An emulated cluster. nodes: the cards of each node. intra: bytes per second of all traffic between the ranks of
    one node; None: unshaped. speeds: for a node, the share of the time that its ranks run; the default is 1.
    """

    ranks_per_node: int
    nodes: tuple[tuple[Card, ...], ...]
    intra: float | None = None
    speeds: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or not self.nodes:
            raise BadInputError(f"{len(self.nodes)} nodes of {self.ranks_per_node} ranks; expected at least 1 of each")
        for node, speed in self.speeds.items():
            if not (0 <= node < len(self.nodes) and 0 < speed <= 1):
                raise BadInputError(
                    f"node {node} has speed {speed:g}; expected one of the nodes 0 to {len(self.nodes) - 1}, and a "
                    "share of the time above 0, up to 1"
                )
        for cards in self.nodes:
            names = [card.interface for card in cards]
            for name in names:
                if not _INTERFACE.fullmatch(name) or name == "lo":
                    raise BadInputError(f"interface {name!r} is not a valid name; expected up to 15 characters")
                if names.count(name) > 1:
                    raise BadInputError(f"interface {name} is the name of two cards of one node; expected two names")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.nodes) * self.ranks_per_node

    @property
    def networks(self) -> list[str]:
        """The networks, in the order of the nodes' cards."""
        return list(dict.fromkeys(card.network for cards in self.nodes for card in cards))

    @property
    def meeting(self) -> str:
        """The network for the rendezvous: `between`, or else the first network of all nodes."""
        common = [name for name in self.networks if all(name in {card.network for card in node} for node in self.nodes)]
        if not common:
            raise BadInputError("the nodes have no network in common; add `between` to the cluster file")
        return "between" if "between" in common else common[0]


def plain(
    nodes: int, ranks_per_node: int, inter: str | None = None, intra: str | None = None, latency: str | None = None
) -> Spec:
    """Return `nodes` equal nodes on one network. inter, intra: rates such as 100mbit. latency: between nodes, such as
    5ms. Raises BadInputError.
    """
    card = Card("eth0", "net0", _rate("inter", inter), _time("latency", latency))
    return Spec(ranks_per_node, ((card,),) * nodes, _rate("intra", intra))


def of_cluster(
    cluster: Cluster,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    slower: float = 1.0,
    intra: str | None = None,
) -> Spec:
    """Return the spec of a cluster file. nodes, ranks_per_node: override its nodes per cluster and ranks per node.

    The i-th cards of all nodes of a cluster share a network; without `between`, those of all clusters do. slower:
    divides rates and multiplies latencies; latencies below SHORTEST become 0. Speeds are relative to the fastest
    cluster. Raises BadInputError.
    """
    if slower <= 0:
        raise BadInputError(f"slower is {slower}; expected a number above 0, by which rates are divided")
    groups = cluster.clusters or (NodeGroup(name="net"),)
    between = cluster.between if len(groups) > 1 else None
    fastest = max(group.speed or 1.0 for group in groups)
    all_nodes: list[tuple[Card, ...]] = []
    speeds: dict[int, float] = {}
    for group in groups:
        count = nodes or group.nodes
        if count is None:
            raise BadInputError(f"{cluster.name or 'the cluster'} does not say how many nodes it has; add --nodes N")
        network = "net" if between is None else f"{group.name}-"
        cards = [_card(nic, f"eth{place}", f"{network}{place}", slower) for place, nic in enumerate(group.cards)]
        if between is not None:
            cards.append(_card(between, f"eth{len(cards)}", "between", slower))
        if (speed := (group.speed or 1.0) / fastest) < 1:
            speeds.update(dict.fromkeys(range(len(all_nodes), len(all_nodes) + count), speed))
        all_nodes += [tuple(cards or [Card("eth0", "net0")])] * count
    return Spec(ranks_per_node or cluster.node.ranks, tuple(all_nodes), _rate("intra", intra), speeds)


def _card(nic: Nic, interface: str, network: str, slower: float) -> Card:
    rate, latency = _rate("bandwidth", nic.bandwidth), _time("latency", nic.latency) * slower
    return Card(nic.interface or interface, network, rate and rate / slower, latency if latency >= SHORTEST else 0.0)


def _rate(key: str, text: str | None) -> float | None:
    try:
        return None if text is None else quantity(text, "byte/s")
    except ValueError as error:
        raise BadInputError(f"{key} is {text!r}; {error}") from None


def _time(key: str, text: str | None) -> float:
    try:
        return 0.0 if text is None else quantity(text, "s")
    except ValueError as error:
        raise BadInputError(f"{key} is {text!r}; {error}") from None
