"""Measured links, and the cluster description that contains their figures. Pure data, no torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmtrain_data import units

from llmtrain.cluster.description import Cluster, Nic, NodeGroup, NodeTier
from llmtrain.cluster.quantity import quantity
from llmtrain.errors import BadInputError
from llmtrain.launch.measure.links import Link

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send and receive")

# A card that is this many times slower than another serves other purposes, such as managing the nodes.
MUCH_SLOWER = 4.0


@dataclass(frozen=True)
class Timing:
    """One operation. size: bytes of the larger of a rank's buffers. seconds: on the slowest rank."""

    operation: str
    size: int
    seconds: float

    def sent(self, ranks: int) -> float:
        """Return the bytes per second that each of `ranks` must send at least (nccl-tests' "bus bandwidth")."""
        parts = {"all-reduce": 2 * (ranks - 1) / ranks, OPERATIONS[-1]: 1.0}
        return self.size / self.seconds * parts.get(self.operation, (ranks - 1) / ranks)


@dataclass(frozen=True)
class Measured:
    """A measured link. latency: seconds of one message. rate: bytes per second that one rank sends while all send."""

    link: Link
    latency: float
    rate: float
    timings: tuple[Timing, ...]

    @property
    def bandwidth(self) -> float:
        """Bytes per second in one direction: of one rank inside the node, of a node's card or cards beyond it."""
        return self.rate * self.link.sharing


def described(cluster: Cluster, found: Sequence[Measured]) -> Cluster:
    """Return the description with the measured figures in place of its own; the rest stays."""
    any_socket = [measured for measured in found if measured.link.sockets is None]
    inside = {measured.link.tier: measured for measured in any_socket if measured.link.tier not in ("cluster", "all")}
    tiers = list(cluster.node.tiers)
    if "node" in inside and "node" not in [tier.name for tier in tiers]:
        tiers.append(NodeTier(name="node", ranks=cluster.node.ranks))
    between = next((measured for measured in any_socket if measured.link.tier == "all"), None)
    return replace(
        cluster,
        node=replace(cluster.node, tiers=tuple(_tier(tier, inside.get(tier.name)) for tier in tiers)),
        clusters=tuple(_group(group, index, any_socket) for index, group in enumerate(cluster.clusters)),
        between=_card(cluster.between, between) if cluster.between else None,
    )


def without_slow_cards(cluster: Cluster) -> Cluster:
    """Return the description without cards that are much slower than their cluster's fastest or of another kind."""
    return replace(cluster, clusters=tuple(map(_without_slow_cards, cluster.clusters)))


def as_data(cluster: Cluster) -> dict[str, Any]:
    """Return a description as plain data, without unknown values."""
    return {key: kept for key, value in asdict(cluster).items() if (kept := _known(value)) is not None}


def write_cluster(output: Path, cluster: Cluster, how: str) -> None:
    """Write a description to a file. how: what measured it."""
    from omegaconf import OmegaConf

    text = OmegaConf.to_yaml(OmegaConf.create(as_data(cluster)))
    output.write_text(f"# Measured by {how}.\n{text}", encoding="utf-8")


def check_writable(*files: Path | None) -> None:
    """Raise BadInputError if the folder of a file that is to be written does not exist."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise BadInputError(f"{file} cannot be written: there is no folder {file.parent}; make it first")


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: kept for key, item in value.items() if (kept := _known(item)) is not None} or None
    if isinstance(value, list | tuple):
        return [_known(item) for item in value] or None
    return value


def _tier(tier: NodeTier, measured: Measured | None) -> NodeTier:
    if measured is None:
        return tier
    return replace(tier, bandwidth=units.rate(measured.bandwidth), latency=units.seconds(measured.latency))


def _group(group: NodeGroup, index: int, found: Sequence[Measured]) -> NodeGroup:
    own = {measured.link.card: measured for measured in found if measured.link.cluster == index}
    cards = [_card(card, own.get(number), own.get(None), len(group.cards)) for number, card in enumerate(group.cards)]
    return replace(group, nic=cards[0]) if group.nic else replace(group, nics=tuple(cards))


def _card(card: Nic, measured: Measured | None, together: Measured | None = None, cards: int = 1) -> Nic:
    """Return a card with its own figures, or else with its share of the figures of all `cards` of the node."""
    if measured is not None:
        together, cards = measured, 1
    if together is None:
        return card
    bandwidth, latency = units.bit_rate(together.bandwidth / cards), units.seconds(together.latency)
    return replace(card, bandwidth=bandwidth, latency=latency)


def _without_slow_cards(group: NodeGroup) -> NodeGroup:
    rates = [quantity(card.bandwidth, "byte/s") if card.bandwidth else 0.0 for card in group.cards]
    if len(rates) < 2:
        return group
    fastest = group.cards[rates.index(max(rates))]
    kept = [
        card
        for card, rate in zip(group.cards, rates, strict=True)
        if card.kind == fastest.kind and rate * MUCH_SLOWER > max(rates)
    ]
    return replace(group, nic=kept[0], nics=()) if len(kept) == 1 else replace(group, nics=tuple(kept))
