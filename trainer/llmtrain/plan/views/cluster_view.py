"""A cluster and the groups of a run on it, as plain data and as tables. No torch in here."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from llmtrain_data import units
from llmtrain_data.output import table
from rich.table import Table

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.nic import cards_of
from llmtrain.cluster.rank_topology import RankTopology
from llmtrain.cluster.tiers import Tier, axis_tiers
from llmtrain.cluster.topology import clusters_of, nodes_of, placement_advice, stage_speeds

Described = dict[str, Any]


def describe(topology: RankTopology) -> Described:
    """Return the cluster and the groups of ranks on it as plain data. Tiers have rates in bytes per second, of a rank
    or of a node, and times in seconds; network cards have theirs as text with units.

    Each group has its ranks, where they are, and the network card of its first rank (None: the backend chooses).
    """
    cluster, tiers, layout = topology.cluster, topology.tiers, topology.grid
    return {
        "name": cluster.name if cluster else None,
        "ranks": layout.world,
        "ranks_per_node": cluster.node.ranks if cluster else None,
        "tiers": [_tier(tier) for tier in tiers],
        "clusters": list(_clusters(cluster, layout.world)) if cluster else [],
        "between": asdict(cluster.between) if cluster and cluster.between else None,
        "order": "-".join(axis.value for axis in layout.degrees),
        "axes": {axis.value: _axis(cluster, tiers, layout, axis) for axis in layout.degrees},
        "stage_speeds": stage_speeds(cluster, layout),
        "advice": placement_advice(cluster, layout),
    }


def tables(found: Described) -> Iterator[Table | str]:
    """Yield tables and lines that show what `describe` returned, in the order to print."""
    machine = (
        f"{found['name'] or 'a cluster'}, {found['ranks_per_node']} on each node"
        if found["ranks_per_node"]
        else "one machine"
    )
    yield f"{units.count(found['ranks'], 'rank')} on {machine}"
    yield ""
    yield table(
        ("tier", "ranks", "bandwidth", "latency"),
        [
            (_names(tier), _ranks(tier), _bandwidth(tier), _known(tier["latency"], units.seconds))
            for tier in found["tiers"]
        ],
    )
    if found["clusters"]:
        rows = [
            (each["name"], each["nodes"], _few(each["ranks"]), _cards(each["cards"]), each["speed"] or "-")
            for each in found["clusters"]
        ]
        if found["between"]:
            rows.append(("between", "-", "-", _cards([found["between"]]), "-"))
        yield ""
        yield table(("cluster", "nodes", "ranks", "cards of a node", "speed"), rows)
    yield ""
    yield table(("axis", "ranks", "groups", "where", "card", "such as"), list(_rows(found)))
    yield ""
    if found["stage_speeds"]:
        yield f"speeds of the stages: {', '.join(f'{speed:g}' for speed in found['stage_speeds'])}"
    yield from found["advice"]


def _tier(tier: Tier) -> Described:
    return asdict(tier) | {"bandwidth_per": tier.per}


def _axis(cluster: Cluster | None, tiers: Sequence[Tier], layout: Layout, axis: Axis) -> Described:
    groups = layout.groups(axis)
    cards = cards_of(cluster, groups)
    # Convert each card once: many groups share few cards.
    shown = {id(card): asdict(card) for card in cards if card}
    return {
        "degree": layout.degrees[axis],
        "tiers": [_tier(tier) for tier in axis_tiers(tiers, layout, axis)],
        "groups": [
            {
                "ranks": group,
                "lies": _lies(cluster, tiers, group),
                "card": shown.get(id(card)),
            }
            for group, card in zip(groups, cards, strict=True)
        ],
    }


def _lies(cluster: Cluster | None, tiers: Sequence[Tier], group: Sequence[int]) -> str:
    """Return the smallest part of the cluster that has all ranks of the group."""
    if len(group) == 1:
        return "alone"
    within = next(tier for tier in tiers if tier.group(group[0]) == tier.group(group[-1]))
    if cluster is None or within.ranks < cluster.node.ranks:
        return f"inside a {within.name}" if within.ranks < tiers[-1].ranks else "on one machine"
    nodes, clusters = nodes_of(cluster, group), clusters_of(cluster, group)
    if len(nodes) == 1:
        return "inside a node"
    names = [each.name for each in cluster.clusters]
    if len(clusters) > 1:
        return f"across {', '.join(names[index] for index in clusters)}"
    return f"inside {names[clusters[0]]}" if names else "across nodes"


def _clusters(cluster: Cluster, world: int) -> Iterator[Described]:
    first = 0
    for each in cluster.clusters:
        # The only cluster of a description has as many nodes as the run needs.
        nodes = (each.nodes if len(cluster.clusters) > 1 else None) or -(-world // cluster.node.ranks)
        ranks = list(range(first, min(first + nodes * cluster.node.ranks, world)))
        first += len(ranks)
        cards = [asdict(card) for card in each.cards]
        yield {"name": each.name, "nodes": nodes, "ranks": ranks, "cards": cards, "speed": each.speed}


def _rows(found: Described) -> Iterator[Sequence[Any]]:
    """Yield one row for all groups of an axis that lie in the same part of the cluster and have the same card."""
    for axis, shown in found["axes"].items():
        kinds = [(each["lies"], _cards([each["card"]] if each["card"] else [])) for each in shown["groups"]]
        for (lies, card), count in Counter(kinds).items():
            first = shown["groups"][kinds.index((lies, card))]["ranks"]
            yield axis, shown["degree"], count, lies, card, _few(first)


def _names(tier: Described) -> str:
    return ", ".join((*tier["aliases"], tier["name"]))


def _ranks(tier: Described) -> str:
    """Return the ranks of the tier's groups."""
    return ", ".join(map(str, tier["sizes"] or [tier["ranks"]]))


def _bandwidth(tier: Described) -> str:
    return _known(tier["bandwidth"], lambda rate: f"{units.rate(rate)} per {tier['bandwidth_per']}")


def _cards(cards: Sequence[Described]) -> str:
    texts = (" ".join(filter(None, (card["interface"], card["kind"], card["bandwidth"]))) for card in cards)
    return "; ".join(texts) or "-"


def _few(ranks: Sequence[int]) -> str:
    """Return evenly spaced ranks as short text: `0-7`, or `0, 8 ... 56`."""
    if len(ranks) > 2 and all(later - earlier == 1 for earlier, later in pairwise(ranks)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}, {ranks[1]} ... {ranks[-1]}"


def _known(value: float | None, shown: Callable[[float], str]) -> str:
    return "-" if value is None else shown(value)
