"""The measurements, as plain data and as tables."""

from collections.abc import Iterator, Sequence
from typing import Any

from llmtrain_data import units
from llmtrain_data.output import table
from rich.table import Table

from llmtrain.cluster.description import Cluster
from llmtrain.launch.measure.result import Measured, as_data


def name_of(measured: Measured, cluster: Cluster) -> str:
    """Return the link's name for people: `node`, `ib over ib0` or `between clusters over eth0, cross socket`."""
    link = measured.link
    card = link.nic(cluster, link.groups[0][0])
    over = f" over {card.interface}" if card and card.interface else ""
    if link.cluster is not None:
        group = cluster.clusters[link.cluster]
        name = group.name + (f" over all {len(group.cards)} cards" if link.card is None else over)
    else:
        name = f"between clusters{over}" if link.tier == "all" else link.tier
    return name + (f", {link.sockets} socket" if link.sockets else "")


def plain(found: Sequence[Measured], before: Cluster, after: Cluster, backend: str, world: int) -> dict[str, Any]:
    """Return the measurements as plain data, in bytes, seconds and bytes per second.

    before: the description that the links come from. after: the description with the measured figures.
    """
    return {
        "ranks": world,
        "backend": backend,
        "links": [
            {
                "name": name_of(measured, before),
                "tier": measured.link.tier,
                "sockets": measured.link.sockets,
                "groups": [list(group) for group in measured.link.groups],
                "ranks_sharing": measured.link.sharing,
                "bandwidth": measured.bandwidth,
                "latency": measured.latency,
                "timings": [
                    {"operation": each.operation, "size": each.size, "seconds": each.seconds}
                    for each in measured.timings
                ],
            }
            for measured in found
        ],
        "cluster": as_data(after),
    }


def tables(found: Sequence[Measured], cluster: Cluster) -> Iterator[Table]:
    """Yield a table of the links, and one of the operations over them."""
    links = []
    for measured in found:
        sharing = str(measured.link.sharing) if measured.link.tier in ("cluster", "all") else "-"
        rate = units.rate(measured.bandwidth)
        if sharing != "-":
            rate += f" ({units.bit_rate(measured.bandwidth)})"
        members = str(len(measured.link.groups[0]))
        links.append((name_of(measured, cluster), members, sharing, rate, units.seconds(measured.latency)))
    yield table(("link", "ranks", "ranks at a card", "bandwidth", "latency"), links)
    done = []
    for measured in found:
        for operation in dict.fromkeys(each.operation for each in measured.timings):
            own = [each for each in measured.timings if each.operation == operation]
            moved = own[-1].sent(len(measured.link.groups[0])) * measured.link.sharing
            ends = [text for each in (own[0], own[-1]) for text in _shown(each.size, each.seconds)]
            done.append((name_of(measured, cluster), operation, *ends, units.rate(moved)))
    yield table(("link", "operation", "smallest", "takes", "largest", "takes", "moves"), done)


def _shown(size: int, seconds: float) -> tuple[str, str]:
    return units.size(size), units.seconds(seconds)
