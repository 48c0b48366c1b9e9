"""This process's place in the run: its rank, its device and its process groups, passed on as arguments."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.layout import Layout
from llmtrain.cluster.nic import card_of
from llmtrain.cluster.tiers import Tier
from llmtrain.comm.activity import Activity
from llmtrain.comm.backend import collectives_of
from llmtrain.comm.collectives import Collectives
from llmtrain.comm.crash_notes import CRASH_NOTES, Ending
from llmtrain.comm.device import device_of
from llmtrain.comm.groups import gloo_over, group_options
from llmtrain.comm.watchdog import Watchdog
from llmtrain.comm.workspace import Workspace
from llmtrain.errors import RunFailedError

ALONE = (Tier("all", 1),)
# How long ranks wait for what the main rank has to say.
_PATIENCE = timedelta(hours=1)


@dataclass(frozen=True)
class Ranks:
    """One rank's view of the run.

    store: key-value store shared by all ranks; None in a run of one process, which has no process group either.
    tiers: of links between all ranks, fastest first. cluster: whose network cards the process groups are made on; None
    for the default of each machine. activity: takes notes of what this rank does. watchdog: what watches over all
    ranks. timeout: of everything that ranks do together; None: torch's own.
    """

    rank: int
    local_rank: int
    layout: Layout
    device: torch.device
    store: dist.Store | None = None
    tiers: tuple[Tier, ...] = ALONE
    cluster: Cluster | None = None
    activity: Activity = field(default_factory=Activity)
    watchdog: Watchdog | None = None
    timeout: timedelta | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for the run."""
        return self.rank == 0

    def host_of(self, rank: int) -> str:
        """Return the name of the machine that a rank is on."""
        return socket.gethostname() if self.watchdog is None else self.watchdog.host_of(rank)

    def collectives(
        self, group: dist.ProcessGroup, order: Sequence[int] | None = None, workspace: Workspace | None = None
    ) -> Collectives:
        """Return the collectives of a process group. order, workspace: see Collectives. Collective over the group."""
        node = next((tier.ranks for tier in self.tiers if "node" in (tier.name, *tier.aliases)), 1)
        return collectives_of(group, self.device, node, order, workspace)

    def sum_all(self, values: list[float]) -> list[float]:
        """Return the sums of `values` over all ranks, in fp64, the same on every rank. Collective."""
        if self.layout.world == 1:
            return values
        self.activity.record("all_reduce over all ranks")
        summed = torch.tensor(values, dtype=torch.float64, device=self.device)
        assert dist.group.WORLD is not None
        # As if every rank were on a node of its own: the nodes are not known yet when a run begins.
        everyone = collectives_of(dist.group.WORLD, self.device, node=1)
        self.activity.wait(lambda: everyone.all_reduce(summed).wait())
        return [float(value) for value in summed.tolist()]

    def gather_all(self, values: list[int]) -> list[list[int]]:
        """Return every rank's `values`, as many of each and within int64, in the order of ranks. Collective."""
        if self.layout.world == 1:
            return [values]
        own = torch.tensor(values, dtype=torch.int64, device=self.device)
        gathered = [torch.empty_like(own) for _ in range(self.layout.world)]
        dist.all_gather(gathered, own)
        return [each.tolist() for each in gathered]

    def all_agree(self, ok: bool) -> bool:
        """Return whether every rank says `ok`. Collective."""
        return self.sum_all([0.0 if ok else 1.0]) == [0.0]

    def from_main(self, name: str, text: str) -> str:
        """Return what the main rank passes as `text`. name: of this exchange, used once in a run. Collective."""
        if self.store is None:
            return text
        if self.is_main:
            self.store.set(name, text)
        # The main rank may wait for a lock or a disk before it speaks; the watchdog ends the wait for one that is gone.
        self.store.wait([name], _PATIENCE)
        heard = str(self.store.get(name).decode())
        # The main rank has the store, and may end over what it says: not before all others have heard it.
        if self.store.add(f"{name} was heard", 1) == self.layout.world:
            self.store.set(f"{name} is known", "")
        if self.is_main:
            self.store.get(f"{name} is known")
        return heard


def connect(
    layout: Layout,
    tiers: tuple[Tier, ...] = ALONE,
    timeout: timedelta = timedelta(minutes=10),
    cluster: Cluster | None = None,
    noted: bool = False,
) -> Ranks:
    """Join the run that the environment describes (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).

    gloo on CPU, NCCL on CUDA. One process alone needs no environment and makes no process group. cluster: see Ranks;
    the group of all ranks is on the network that joins them all. Where one machine has all ranks (LOCAL_WORLD_SIZE),
    whatever nodes it plays, no card is asked for. timeout: within which a rank that is gone ends the others, as does,
    where ranks note what they do (noted), one that hangs.
    Raises BadInputError when this machine has no such card, RunFailedError when the ranks do not find each other.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == str(layout.world):
        cluster = None
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = device_of(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if layout.world == 1:
        return Ranks(0, 0, layout, device)
    store, rank = _meet(timeout)
    activity = Activity(rank, os.environ.get(CRASH_NOTES))
    own = dist.PrefixStore("watch", store).clone()  # type: ignore[attr-defined]
    watchdog = Watchdog(activity, own, layout.world, timeout.total_seconds(), noted)
    backend = "nccl" if device.type == "cuda" else "gloo"
    card = card_of(cluster, [range(layout.world)], rank)
    if backend == "nccl" and card is not None and card.interface is not None:
        # Read once, for where ranks meet and for sockets: = stands for the whole name.
        os.environ["NCCL_SOCKET_IFNAME"] = f"={card.interface}"
    # The watchdog ends what hangs, and can say why.
    patience = 2 * timeout
    with gloo_over(card):
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=layout.world,
            timeout=patience,
            pg_options=group_options(backend, cluster, card),
        )
    store = dist.PrefixStore("llmtrain", store)
    return Ranks(rank, local_rank, layout, device, store, tiers, cluster, activity, watchdog, patience)


def _meet(timeout: timedelta) -> tuple[dist.Store, int]:
    """Return the store that all ranks share, and this one's rank."""
    try:
        store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
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
    return store, rank


def watched(ranks: Ranks, timeout: timedelta) -> Ranks:
    """Return the only rank of a run with a watchdog over it: it may hang in a file system that is gone."""
    return replace(ranks, watchdog=Watchdog(ranks.activity, dist.HashStore(), 1, timeout.total_seconds(), noted=True))


def disconnect(ranks: Ranks) -> None:
    """Leave the run's process groups, with nothing more to do."""
    ranks.activity.ended(Ending.WELL)
    if ranks.watchdog is not None:
        ranks.watchdog.end()
    if ranks.layout.world > 1:
        dist.destroy_process_group()
