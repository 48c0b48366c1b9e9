"""The description of a cluster: the recipe's `cluster` section, or a file of its own.

Quantities stay text with units, as written; `llmtrain.cluster.quantity` converts them to numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from llmtrain_data.bounds import Factor, NodeRanks, PositiveRanks
from pydantic import Field

from llmtrain.cluster.quantity import Bandwidth, Size, Speed, Time, Unit, quantity

CoreCount = Annotated[int, Field(ge=1, le=2**16)]
Socket = Annotated[int, Field(ge=0, le=2**16)]


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The device that one rank computes on. name: the card's name, from which `llmtrain plan` takes a peak that is left
    out. memory: its size, which `auto` of `zero.partition` fills, and which no run may exceed. peak: datasheet speed by
    compute dtype (fp32, bf16, fp16), for the least time of a step and for the MFU of cards whose name is unknown.
    bandwidth: bandwidth of its memory, for the least time of the optimizer's step. host_link: bandwidth to the host's
    memory in one direction, for the least time of what offload sends and of copies for checkpoints.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    name: str | None = None
    memory: Size | None = None
    peak: Mapping[str, Speed] = field(default_factory=dict)
    bandwidth: Bandwidth | None = None
    host_link: Bandwidth | None = None

    def __post_init__(self) -> None:
        _check_quantities(self, memory="byte", bandwidth="byte/s", host_link="byte/s")
        for dtype, speed in self.peak.items():
            if dtype not in _COMPUTE:
                raise ValueError(f"peak.{dtype} is no compute dtype; expected {', '.join(_COMPUTE)}")
            _check_quantity(f"peak.{dtype}", speed, "FLOP/s")


@dataclass(frozen=True, kw_only=True)
class NodeTier:
    """Ranks of one node with faster links between them, such as the two dies of a card. name: the name that
    `zero.partition` may use for their number, such as die. ranks: number of these ranks, which are consecutive.

    bandwidth: bandwidth from one rank to the others, in one direction. latency: latency of one message.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    name: str
    ranks: NodeRanks
    bandwidth: Bandwidth | None = None
    latency: Time | None = None

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in ("cluster", "all", "auto"):
            raise ValueError(f"name is {self.name!r}; expected a word other than cluster, all and auto")
        _check_quantities(self, bandwidth="byte/s", latency="s")


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host of a node. memory: such as 512GiB, the limit for the offloaded states of all ranks of the node and
    for the copies and buffers of their checkpoints. bandwidth: of the host's memory, from which the least time of
    an optimizer step on the host is computed. cores: number of cores of all processors; each rank steps offloaded
    states with an even share of them, at most with its share of those that it finds. sockets: number of processors,
    among which the ranks are divided evenly; by default the number of sockets that `node.nvme` names.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    memory: Size | None = None
    bandwidth: Bandwidth | None = None
    cores: CoreCount | None = None
    sockets: CoreCount | None = None

    def __post_init__(self) -> None:
        _check_quantities(self, memory="byte", bandwidth="byte/s")


@dataclass(frozen=True, kw_only=True)
class Nvme:
    """A solid-state drive of every node. path: a folder on it, for every nvme of `offload`. bandwidth: bandwidth in
    one direction, by which bytes are shared out over several drives. socket: number of the processor that it is
    attached to, from 0; ranks of that processor use it first.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    path: str
    bandwidth: Bandwidth | None = None
    socket: Socket | None = None

    def __post_init__(self) -> None:
        _check_quantities(self, bandwidth="byte/s")


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node; all nodes are equal. ranks: processes on it, one for each accelerator.

    tiers: groups of its ranks with faster links, from the smallest; the group of all its ranks is named node. host: the
    machine around the accelerators. nvme: its solid-state drives.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    ranks: NodeRanks
    tiers: tuple[NodeTier, ...] = ()
    host: Host | None = None
    nvme: tuple[Nvme, ...] = ()

    def __post_init__(self) -> None:
        smaller = 1
        for tier in self.tiers:
            key = f"tiers.{tier.name}.ranks is {tier.ranks}"
            if (tier.name == "node") != (tier.ranks == self.ranks):
                raise ValueError(f"{key}; the tier of all {self.ranks} ranks, and no other, is called node")
            if tier.ranks <= smaller or tier.ranks % smaller or self.ranks % tier.ranks:
                above = f"a multiple of the {smaller} of the tier before it, and" if smaller > 1 else "above 1, and"
                raise ValueError(f"{key}; expected {above} a divisor of the node's {self.ranks}")
            smaller = tier.ranks
        for index, drive in enumerate(self.nvme):
            if drive.path in [other.path for other in self.nvme[:index]]:
                raise ValueError(f"nvme[{index}].path is {drive.path}, as that of another drive; give a folder of each")
            if drive.socket is not None and drive.socket >= self.sockets:
                raise ValueError(
                    f"nvme[{index}].socket is {drive.socket}; expected a number below host.sockets, which is "
                    f"{self.sockets}"
                )

    @property
    def sockets(self) -> int:
        """The number of processors: as stated, or else as many as the drives name."""
        if self.host is not None and self.host.sockets is not None:
            return self.host.sockets
        return max((drive.socket + 1 for drive in self.nvme if drive.socket is not None), default=1)


@dataclass(frozen=True, kw_only=True)
class Nic:
    """A network card of every node. kind: kind of network; cards of different kinds cannot reach each other. interface:
    name of the card in the operating system. bandwidth: bandwidth in one direction. latency: latency of one message.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    kind: str = "ethernet"
    interface: str | None = None
    bandwidth: Bandwidth | None = None
    latency: Time | None = None

    def __post_init__(self) -> None:
        _check_quantities(self, bandwidth="byte/s", latency="s")


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes on one network: one of the `clusters`. Its ranks are consecutive.

    name: name of the cluster. nodes: number of nodes; in the only cluster, the maximum, or null for any number. nic:
    network card of each node. nics: network cards of each node, if it has several. speed: speed of its ranks relative
    to other clusters, such as 1.5 against 1, for the split of layers into stages; null: 1 if another cluster has a
    speed, else unknown.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    name: str
    nodes: PositiveRanks | None = None
    nic: Nic | None = None
    nics: tuple[Nic, ...] = ()
    speed: Factor | None = None

    def __post_init__(self) -> None:
        if self.nic is not None and self.nics:
            raise ValueError("nics and nic are both given; expected one of them, so put all cards into nics")
        kinds = sorted({card.kind for card in self.cards})
        if len(kinds) > 1:
            raise ValueError(f"nics are of the kinds {', '.join(kinds)}; expected one, as each node uses all of them")

    @property
    def cards(self) -> tuple[Nic, ...]:
        """The network cards of each node."""
        return self.nics if self.nic is None else (self.nic,)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines that the ranks run on. name: name of the description. accelerator: the device that one rank computes
    on. node: a node; all nodes are equal. between: the network that connects the clusters.

    clusters: the groups of nodes on one network; empty for a single network that is not described.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    name: str | None = None
    accelerator: Accelerator | None = None
    node: Node
    clusters: tuple[NodeGroup, ...] = ()
    between: Nic | None = None

    def __post_init__(self) -> None:
        if len(self.clusters) < 2:
            return
        names = [group.name for group in self.clusters]
        for index, group in enumerate(self.clusters):
            if group.nodes is None:
                raise ValueError(f"clusters[{index}].nodes is missing; with several clusters, each says how many")
            if group.name in names[:index]:
                raise ValueError(f"clusters[{index}].name is {group.name}, as is an earlier one's; expected another")
        kinds = sorted({card.kind for group in self.clusters for card in group.cards})
        if len(kinds) > 1 and self.between is None:
            raise ValueError(
                f"between is missing; the clusters' cards are of the kinds {' and '.join(kinds)}, which cannot speak "
                "to each other, so name the network that joins them"
            )


_COMPUTE = ("fp32", "bf16", "fp16")


def _check_quantities(section: Any, **units: Unit) -> None:
    for key, unit in units.items():
        if getattr(section, key) is not None:
            _check_quantity(key, getattr(section, key), unit)


def _check_quantity(key: str, value: str, unit: Unit) -> None:
    try:
        quantity(value, unit)
    except ValueError as error:
        raise ValueError(f"{key} is {value!r}; {error}") from None
