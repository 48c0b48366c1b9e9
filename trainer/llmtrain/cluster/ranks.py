"""This process's place in the run: its rank, its device and its process groups, passed on as arguments."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from llmtrain.cluster.cards import card_of
from llmtrain.cluster.config import Cluster
from llmtrain.cluster.groups import gloo_over, group_options
from llmtrain.cluster.layout import Layout
from llmtrain.cluster.tiers import Tier

ALONE = (Tier("all", 1),)


@dataclass(frozen=True)
class Ranks:
    """One rank's view of the run.

    store: key-value store shared by all ranks; None in a run of one process, which has no process group either.
    tiers: of links between all ranks, fastest first. cluster: whose network cards the process groups are made on; None
    for the default of each machine.
    """

    rank: int
    local_rank: int
    layout: Layout
    device: torch.device
    store: dist.Store | None = None
    tiers: tuple[Tier, ...] = ALONE
    cluster: Cluster | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for the run."""
        return self.rank == 0

    def sum_all(self, values: list[float]) -> list[float]:
        """Return the sums of `values` over all ranks, in fp64, the same on every rank. Collective."""
        if self.layout.world == 1:
            return values
        summed = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(summed)
        return [float(value) for value in summed.tolist()]

    def all_agree(self, ok: bool) -> bool:
        """Return whether every rank says `ok`. Collective."""
        return self.sum_all([0.0 if ok else 1.0]) == [0.0]

    def from_main(self, name: str, text: str) -> str:
        """Return what the main rank passes as `text`. name: of this exchange, used once in a run. Collective."""
        if self.store is None:
            return text
        if self.is_main:
            self.store.set(name, text)
        return str(self.store.get(name).decode())


def device_of(local_rank: int) -> torch.device:
    """Return the local rank's CUDA device, or the CPU where there is none."""
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def connect(
    layout: Layout,
    tiers: tuple[Tier, ...] = ALONE,
    timeout: timedelta = timedelta(minutes=10),
    cluster: Cluster | None = None,
) -> Ranks:
    """Join the run that the environment describes (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).

    gloo on CPU, NCCL on CUDA. One process alone needs no environment and makes no process group. cluster: see Ranks;
    the group of all ranks is on the network that joins them all. Where one machine has all ranks (LOCAL_WORLD_SIZE),
    whatever nodes it plays, no card is asked for. Raises BadInputError when this machine has no such card.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == str(layout.world):
        cluster = None
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = device_of(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if layout.world == 1:
        return Ranks(0, 0, layout, device)
    store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
    backend = "nccl" if device.type == "cuda" else "gloo"
    card = card_of(cluster, [range(layout.world)], rank)
    if backend == "nccl" and card is not None and card.interface is not None:
        # Read once, for where ranks meet and for sockets: = stands for the whole name.
        os.environ["NCCL_SOCKET_IFNAME"] = f"={card.interface}"
    with gloo_over(card):
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=layout.world,
            timeout=timeout,
            pg_options=group_options(backend, cluster, card),
        )
    return Ranks(rank, local_rank, layout, device, dist.PrefixStore("llmtrain", store), tiers, cluster)


def disconnect(ranks: Ranks) -> None:
    """Leave the run's process groups."""
    if ranks.layout.world > 1:
        dist.destroy_process_group()
