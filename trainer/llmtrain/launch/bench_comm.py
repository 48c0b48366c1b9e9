"""`llmtrain bench comm`: measure the links between ranks, and write a cluster description with the figures."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain_data import units
from llmtrain_data.output import Terminal, say, say_json
from llmtrain_data.waiting import loading

from llmtrain.cluster.description import Accelerator, Cluster, Nic
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.load import load_cluster
from llmtrain.cluster.tiers import tiers
from llmtrain.comm.environment import Launched, heed_launcher, launched
from llmtrain.errors import BadInputError
from llmtrain.launch.ending import end_together, reported_once
from llmtrain.launch.gpus import check_gpus, set_gpu_variables
from llmtrain.launch.measure.discover import Machine, discovered, this_machine
from llmtrain.launch.measure.links import Link, links, socket_links
from llmtrain.launch.measure.result import Measured, check_writable, described, without_slow_cards, write_cluster

if TYPE_CHECKING:
    from torch.distributed import Store

    from llmtrain.comm.ranks import Ranks

# A rank that waits for a lost rank gives up after this time.
TIMEOUT = timedelta(minutes=2)


@dataclass(frozen=True)
class CommBench:
    """The command's options. cluster: file or name of the description to start from. output, plot: files to write."""

    cluster: str | None = None
    output: Path | None = None
    plot: Path | None = None
    as_json: bool = False

    @property
    def arguments(self) -> list[str]:
        """The command-line arguments that give these options."""
        named = (("--cluster", self.cluster), ("--output", self.output), ("--plot", self.plot))
        given = [word for option, value in named if value is not None for word in (option, str(value))]
        return ["bench", "comm", *given, *(["--json"] if self.as_json else [])]


def bench_comm(options: CommBench, nproc: int | None) -> None:
    """Measure the links between the launched ranks, or start `nproc` ranks here, by default one for each GPU.

    Raises BadInputError, and RunFailedError if ranks cannot reach each other.
    """
    heed_launcher()
    given = load_cluster(options.cluster) if options.cluster else None
    check_writable(options.output, options.plot)
    launched_as = launched(os.environ, nproc)
    with loading("PyTorch", launched_as is None or launched_as.is_first):
        from llmtrain.comm.device import gpu_count

    gpus = gpu_count()
    world = launched_as.world if launched_as else nproc or gpus
    if world < 2:
        raise BadInputError(
            f"bench comm measures the links between at least 2 ranks; here {'is 1' if world else 'is no GPU for any'}; "
            "add --nproc N, or start bench comm through torchrun, srun or mpirun"
        )
    check_gpus(gpus, launched_as, world)
    set_gpu_variables(world)
    if launched_as is not None:
        _measure_as_rank(options, given, launched_as)
        return
    from llmtrain.launch.local import launch

    launch(world, options.arguments)


def _measure_as_rank(options: CommBench, given: Cluster | None, launch: Launched) -> None:
    from llmtrain.comm.device import gpu_count
    from llmtrain.comm.ranks import connect, disconnect
    from llmtrain.launch.local import die_with_launcher

    os.environ.update(launch.variables)
    die_with_launcher()
    one_machine = launch.ranks_per_node >= launch.world
    if launch.world % launch.ranks_per_node and not one_machine:
        raise BadInputError(
            f"there are {launch.world} ranks with {launch.ranks_per_node} on the first node; start as many on each"
        )
    if given is not None:
        tiers(given, launch.world, launch.ranks_per_node)
    machine = this_machine(launch.local_rank, launch.ranks_per_node, _accelerator_address(launch.local_rank))
    machines = list[Machine]()

    def seen(store: "Store") -> Cluster | None:
        machines.extend(_gather_machines(store, launch, machine))
        with reported_once(launch):
            found = _start_from(given, machines, launch.ranks_per_node, one_machine)
        return _to_connect(given, found, gpu_count() > 0)

    # Ranks of clusters that only one network joins cannot connect before they know it.
    ranks = connect(Layout({Axis.DATA: launch.world}), timeout=TIMEOUT, cluster=seen, noted=True)
    with end_together(ranks):
        cluster = _start_from(given, machines, launch.ranks_per_node, one_machine)
        found = _measure(cluster, machines, ranks, one_machine)
        if ranks.is_main:
            _report(options, cluster, found, launch.world, discovered=given is None)
        # Rank 0 hosts the store, so it must leave last.
        ranks.all_agree(True)
    disconnect(ranks)


def _gather_machines(store: "Store", launch: Launched, machine: Machine) -> list[Machine]:
    """Return each rank's view of its machine. Collective."""
    store.set(f"machine/{launch.rank}", json.dumps(machine.as_data()))
    found = [Machine.of(json.loads(store.get(f"machine/{rank}"))) for rank in range(launch.world)]
    # Rank 0 holds the store, and may end because of what it has read.
    if store.add("machines read", 1) == launch.world:
        store.set("all machines read", "")
    if launch.is_first:
        store.wait(["all machines read"])
    return found


def _start_from(given: Cluster | None, machines: Sequence[Machine], per_node: int, one_machine: bool) -> Cluster:
    """Return the description to measure: the given one, or what the machines show, with a card for each network."""
    if given is not None and (given.clusters or one_machine):
        groups = tuple(group if group.cards else replace(group, nic=Nic()) for group in given.clusters)
        return replace(given, clusters=groups)
    found = discovered(machines, per_node, one_machine)
    if given is not None:
        return replace(given, clusters=found.clusters, between=found.between)
    return replace(found, accelerator=this_accelerator())


def _to_connect(given: Cluster | None, found: Cluster, on_gpus: bool) -> Cluster | None:
    """Return the description whose network joins all ranks, None for that of the environment or NCCL's choice: NCCL
    would use the first of a discovered cluster's networks, and no other."""
    return found if given is not None or len(found.clusters) > 1 or not on_gpus else None


def _measure(cluster: Cluster, machines: Sequence[Machine], ranks: "Ranks", one_machine: bool) -> list[Measured]:
    from llmtrain.comm.device import gpu_count
    from llmtrain.launch.measure.show import name_of
    from llmtrain.launch.measure.timing import measure

    found: list[Measured] = []
    sockets = [machine.socket for machine in machines]
    for link in links(cluster, ranks.layout.world, one_machine, each_card=not gpu_count()):
        for each in (link, *socket_links(link, sockets, _card_socket(link, cluster, machines))):
            found.append(measure(each, cluster, ranks))
            if ranks.is_main:
                rate = units.rate(found[-1].bandwidth)
                say(f"measured {name_of(found[-1], cluster)}: {rate}", err=True)
    return found


def _card_socket(link: Link, cluster: Cluster, machines: Sequence[Machine]) -> int | None:
    """Return the CPU socket of the network card that the link's first rank uses; None if it is unknown."""
    rank = link.groups[0][0]
    nic = link.nic(cluster, rank)
    return next((card.socket for card in machines[rank].cards if nic and card.interface == nic.interface), None)


def _report(options: CommBench, cluster: Cluster, found: list[Measured], world: int, discovered: bool) -> None:
    import torch.distributed as dist

    from llmtrain.launch.measure.show import plain, tables

    after = described(cluster, found)
    if discovered:
        after = without_slow_cards(after)
    if options.output is not None:
        write_cluster(
            options.output, after, f"llmtrain bench comm: {world} ranks over {dist.get_backend()}, {date.today()}"
        )
    if options.plot is not None:
        from llmtrain.launch.measure.figure import links_figure

        options.plot.write_bytes(links_figure(found, cluster))
    if options.as_json:
        say_json(plain(found, cluster, after, dist.get_backend(), world))
        return
    console = Terminal()
    for table in tables(found, cluster):
        console.print(table, "")
    if options.output is not None:
        console.print(f"use it in a recipe with cluster={options.output}")


def this_accelerator() -> Accelerator | None:
    """Return the description of this machine's first GPU; None without one."""
    from llmtrain.comm.device import gpus

    seen = gpus()
    return Accelerator(name=seen[0].name, memory=units.size(seen[0].memory)) if seen else None


def _accelerator_address(local_rank: int) -> str | None:
    """Return the PCI address of a rank's accelerator, None without one."""
    from llmtrain.comm.device import device_of, gpus

    seen, index = gpus(), device_of(local_rank).index
    return seen[index].address if index is not None and index < len(seen) else None
