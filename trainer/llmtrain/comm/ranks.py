"""This process's rank, its device and what connects it to the other ranks of the run."""

import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.layout import Layout
from llmtrain.cluster.nic import card_of
from llmtrain.cluster.tiers import Tier, node_ranks
from llmtrain.comm.activity import Activity
from llmtrain.comm.attempt import of_this_start
from llmtrain.comm.backend import collectives_of
from llmtrain.comm.collectives import Collectives
from llmtrain.comm.crash_notes import CRASH_NOTES, Ending
from llmtrain.comm.device import device_of, named_start, to_device, to_host
from llmtrain.comm.flight_recorder import recorder_of
from llmtrain.comm.groups import ALWAYS, connect_apart, gloo_over, group_options
from llmtrain.comm.nccl_failure import nccl_failure
from llmtrain.comm.registered_memory import RegisteredMemory
from llmtrain.comm.standstill import CONNECTING
from llmtrain.comm.watchdog import Watchdog
from llmtrain.errors import RunFailedError
from llmtrain.plan.collective_buffers import CollectiveBuffers

ALONE = (Tier("all", 1),)
# How long ranks wait for a text from the main rank.
_PATIENCE = timedelta(hours=1)


@dataclass(frozen=True)
class Links:
    """What connects the ranks of a run.

    store: key-value store that all ranks share; None in a run of one process, which has no process group either.
    tiers: of links between all ranks, fastest first. cluster: process groups use its network cards; None for the
    default of each machine. timeout: of everything that ranks do together; None for torch's default. exchanges: how
    often the main rank has told the others a text, by its name.
    """

    store: dist.Store | None = None
    tiers: tuple[Tier, ...] = ALONE
    cluster: Cluster | None = None
    timeout: timedelta | None = None
    exchanges: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Monitoring:
    """activity: records what this rank does. watchdog: ends the run if a rank is lost or hangs; None without one."""

    activity: Activity = field(default_factory=Activity)
    watchdog: Watchdog | None = None


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run, from the view of one of them."""

    rank: int
    local_rank: int
    layout: Layout
    device: torch.device
    links: Links = Links()
    monitoring: Monitoring = field(default_factory=Monitoring)

    @property
    def is_main(self) -> bool:
        """Whether this rank prints, logs and decides for the run."""
        return self.rank == 0

    @property
    def store(self) -> dist.Store | None:
        """See Links."""
        return self.links.store

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """See Links."""
        return self.links.tiers

    @property
    def activity(self) -> Activity:
        """See Monitoring."""
        return self.monitoring.activity

    @property
    def watchdog(self) -> Watchdog | None:
        """See Monitoring."""
        return self.monitoring.watchdog

    @property
    def node(self) -> int:
        """Number of ranks of a node; 1 if the tiers do not say it."""
        return node_ranks(self.tiers)

    def on_grid(self, layout: Layout, tiers: tuple[Tier, ...]) -> "Ranks":
        """Return the same ranks with another layout and other tiers."""
        return replace(self, layout=layout, links=replace(self.links, tiers=tiers))

    def host_of(self, rank: int) -> str:
        """Return the name of the machine that a rank is on."""
        return socket.gethostname() if self.watchdog is None else self.watchdog.host_of(rank)

    def collectives(
        self, group: dist.ProcessGroup, buffers: CollectiveBuffers, order: Sequence[int] | None = None
    ) -> Collectives:
        """Return the collectives of a process group. order: see Collectives. Collective over the group."""
        return collectives_of(group, self.device, self.node, buffers, order)

    def registered_memory(self) -> RegisteredMemory:
        """Return memory for buffers of collectives that NCCL has registered."""
        assert dist.group.WORLD is not None
        return RegisteredMemory(dist.group.WORLD, self.device)

    def sum_all(self, values: Sequence[float | Tensor]) -> list[float]:
        """Return the sums of `values`, numbers or scalar tensors, over all ranks, in fp64; see `sums`. The host waits
        once for all of them. Collective."""
        found: list[float] = to_host(self.sums(values)).tolist()
        return found

    def sums(self, values: Sequence[float | Tensor]) -> Tensor:
        """Return the sums of `values` over all ranks, fp64 `[n]` on this rank's device, the same on every rank.
        Collective.

        values: numbers of the host, and scalars on this rank's device.
        """
        numbers = [0.0 if isinstance(value, Tensor) else value for value in values]
        summed = to_device(torch.tensor(numbers, dtype=torch.float64), self.device)
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                summed[index] = value
        if self.layout.world > 1:
            self._sum_over_ranks(summed)
        return summed

    def _sum_over_ranks(self, summed: Tensor) -> None:
        self.activity.record("all_reduce over all ranks")
        assert dist.group.WORLD is not None
        # node=1 means no shared memory: a run does not know its nodes yet when it starts.
        buffers = CollectiveBuffers(self.layout.world, sequential=False)
        everyone = collectives_of(dist.group.WORLD, self.device, 1, buffers)
        self.activity.wait(lambda: everyone.all_reduce(summed).wait())

    def gather_all(self, values: list[int]) -> list[list[int]]:
        """Return every rank's `values`, as many of each and within int64, in the order of ranks. Collective."""
        if self.layout.world == 1:
            return [values]
        own = to_device(torch.tensor(values, dtype=torch.int64), self.device)
        gathered = [torch.empty_like(own) for _ in range(self.layout.world)]
        dist.all_gather(gathered, own)
        found: list[list[int]] = to_host(torch.stack(gathered)).tolist()
        return found

    def all_agree(self, ok: bool) -> bool:
        """Return whether every rank says `ok`. Collective."""
        return self.sum_all([0.0 if ok else 1.0]) == [0.0]

    def from_main(self, name: str, text: str) -> str:
        """Return the main rank's `text`. name: of this exchange, as all ranks have it. Collective."""
        if self.store is None:
            return text
        # What an earlier exchange of that name has left must not be heard.
        self.links.exchanges[name] += 1
        name = f"{name} {self.links.exchanges[name]}"
        if self.is_main:
            self.store.set(name, text)
        # The main rank may first wait for a lock or a disk. If it is gone, the watchdog ends the wait.
        self.store.wait([name], _PATIENCE)
        heard = str(self.store.get(name).decode())
        # The main rank holds the store and may exit because of the text, but only after all others have read it.
        if self.store.add(f"{name} was heard", 1) == self.layout.world:
            self.store.set(f"{name} is known", "")
        if self.is_main:
            self.store.get(f"{name} is known")
        return heard


def connect(
    layout: Layout,
    tiers: tuple[Tier, ...] = ALONE,
    timeout: timedelta = timedelta(minutes=10),
    cluster: Cluster | Callable[[dist.Store], Cluster | None] | None = None,
    noted: bool = False,
) -> Ranks:
    """Join the run that the environment describes (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).

    The backend is gloo on CPUs and NCCL on GPUs. A single process needs no environment and makes no process group.
    cluster: see Links, or a function that returns it, of a store in which ranks can find out together; the group of all
    ranks uses the network that joins them all. If one machine has all ranks (LOCAL_WORLD_SIZE), the cluster is not
    used. timeout: within it, a rank that is gone ends the others; so does a rank that hangs, if ranks record what they
    do (noted). Raises BadInputError if this machine lacks the network card, RunFailedError if the ranks do not find
    each other.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = device_of(local_rank)
    if device.type == "cuda":
        with named_start():
            torch.cuda.set_device(device)
    if layout.world == 1:
        return Ranks(0, 0, layout, device)
    store, own, rank = _meet(timeout)
    activity = Activity(rank, os.environ.get(CRASH_NOTES))
    recorder = recorder_of(_backend(device))
    watchdog = Watchdog(activity, own, layout.world, timeout.total_seconds(), noted, recorder)
    _check_device(store, rank, device.type)
    activity.record(CONNECTING)
    shared = dist.PrefixStore("llmtrain", store)
    described = cluster(shared) if callable(cluster) else cluster
    if os.environ.get("LOCAL_WORLD_SIZE") == str(layout.world):
        described = None
    # Longer than the watchdog's timeout, as the watchdog says why the run ends.
    patience = 2 * timeout
    _connect_all(store, rank, layout.world, described, patience, device)
    links = Links(shared, tiers, described, patience)
    return Ranks(rank, local_rank, layout, device, links, Monitoring(activity, watchdog))


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _connect_all(
    store: dist.Store, rank: int, world: int, cluster: Cluster | None, patience: timedelta, device: torch.device
) -> None:
    """Make the group of all ranks, over the network that joins them."""
    backend, card = _backend(device), card_of(cluster, [range(world)], rank)
    if backend == "nccl" and card is not None and card.interface is not None:
        # NCCL reads it once, for the rendezvous and for sockets. "=" asks for an exact match of the name.
        os.environ["NCCL_SOCKET_IFNAME"] = f"={card.interface}"
    operations = ALWAYS if backend == "nccl" else patience
    with gloo_over(card), _named_failure(rank):
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world,
            timeout=operations,
            pg_options=group_options(backend, cluster, card, operations),
            # NCCL then connects now, and not in the first step.
            device_id=device if backend == "nccl" else None,
        )
    if backend == "nccl":
        connect_apart()


def _meet(timeout: timedelta) -> tuple[dist.Store, dist.Store, int]:
    """Return the store that all ranks share, a part of it with a connection of its own for the watchdog, and this
    process's rank."""
    try:
        everyone, rank, world = next(dist.rendezvous("env://", timeout=timeout))
        store = of_this_start(everyone, rank, world, timeout)
        own = dist.PrefixStore("watch", store).clone()  # type: ignore[attr-defined]
    except dist.DistError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        if "EADDRINUSE" in str(error):
            raise RunFailedError(
                f"ranks were to meet at {where}, but another program has that port; set MASTER_PORT to a free one"
            ) from error
        raise RunFailedError(
            f"rank {os.environ.get('RANK')} waited {timeout.total_seconds():g} s (train.timeout) in vain for others "
            f"at {where} (MASTER_ADDR, MASTER_PORT); see whether all ranks were started and reach that address"
        ) from error
    return store, own, rank


@contextmanager
def _named_failure(rank: int) -> Iterator[None]:
    """Raise RunFailedError if NCCL or gloo fails in the block."""
    try:
        yield
    except dist.DistBackendError as error:
        why = nccl_failure(error) or "another rank, or the network to it, is gone"
        raise RunFailedError(
            f"NCCL failed on rank {rank} on {socket.gethostname()} as it connected: {why}; "
            "NCCL_DEBUG=INFO shows more. Containers need --ipc=host or a large --shm-size"
        ) from error
    except RuntimeError as error:
        if "gloo" not in str(error):
            raise
        # Without the line of its source.
        why = re.sub(r"\[[^]]*:\d+\] ", "", str(error).partition("\n")[0])
        raise RunFailedError(
            f"gloo failed on rank {rank} on {socket.gethostname()} as it connected: {why}; the interface in the "
            "cluster's description sets the network that it takes, or else GLOO_SOCKET_IFNAME"
        ) from error


def _check_device(store: dist.Store, rank: int, kind: str) -> None:
    """Raise RunFailedError if this rank computes on another kind of device than rank 0. They would wait for each other
    in different libraries."""
    if rank == 0:
        store.set("kind of device", kind)
    main = store.get("kind of device").decode()
    if kind != main:
        found, there = ("no GPU", "has one") if kind == "cpu" else ("a GPU", "has none")
        raise RunFailedError(
            f"rank {rank} on {socket.gethostname()} finds {found}, and rank 0 {there}; see what nvidia-smi says on "
            "both machines, or hide all GPUs (CUDA_VISIBLE_DEVICES=) to train on processors"
        )


def with_watchdog(ranks: Ranks, timeout: timedelta) -> Ranks:
    """Return the only rank of a run with a watchdog: the rank may hang in a file system that is gone."""
    watchdog = Watchdog(ranks.activity, dist.HashStore(), 1, timeout.total_seconds(), noted=True)
    return replace(ranks, monitoring=Monitoring(ranks.activity, watchdog))


def disconnect(ranks: Ranks) -> None:
    """Leave the run's process groups at its end."""
    ranks.activity.ended(Ending.WELL)
    if ranks.watchdog is not None:
        ranks.watchdog.end()
    if ranks.layout.world > 1:
        dist.destroy_process_group()
