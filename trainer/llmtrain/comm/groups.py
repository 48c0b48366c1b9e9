"""Process groups on chosen network cards."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.cluster.description import Cluster, Nic
from llmtrain.cluster.nic import nccl_net
from llmtrain.errors import BadInputError

ALWAYS = timedelta(days=20)
"""The timeout of a run's NCCL groups, in milliseconds within an int32. After a job was suspended, torch would find that
operations have taken too long; the watchdog knows better, and ends runs that hang."""

# gloo reads it whenever it makes a group.
_GLOO_CARD = "GLOO_SOCKET_IFNAME"


def group_over(
    cluster: Cluster | None, card: Nic | None, groups: Sequence[Sequence[int]], backend: str | None = None,
    timeout: timedelta | None = None, ctas: int | None = None,
) -> dist.ProcessGroup | None:  # fmt: skip
    """Make a process group of each list of ranks, and return the one that has this rank, if any. Collective over all
    ranks, which pass the same lists. card: that of this rank's group; None for the backend's choice.

    timeout: of making the groups and of all operations in them; None for torch's default. ctas: see `group_options`.
    """
    backend = backend or dist.get_backend()
    # Then NCCL connects now, and not in the first step.
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    options = group_options(backend, cluster, card, timeout, ctas)
    with gloo_over(card):
        made = [
            dist.new_group(list(members), timeout, backend, pg_options=options, device_id=device) for members in groups
        ]
    return next((group for group, members in zip(made, groups, strict=True) if dist.get_rank() in members), None)


def connect_apart() -> None:
    """Let each further group over NCCL connect by itself.

    torch would else split it from the group of all ranks. All of them take part in each split, one after the other, and
    wait there with Python's lock, so that no watchdog could end a run in which one of them is lost.
    """
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = None


@contextmanager
def gloo_over(card: Nic | None) -> Iterator[None]:
    """Make groups that this process creates inside the block use `card`; None: the environment decides. Raises
    BadInputError if this machine lacks the card's interface."""
    if card is None or card.interface is None:
        yield
        return
    here = [name for _, name in socket.if_nameindex()]
    if card.interface not in here:
        raise BadInputError(
            f"the cluster's description has a card with the interface {card.interface}, but this machine has "
            f"{', '.join(here)}; correct it, or leave it out for the machine's default"
        )
    before = os.environ.get(_GLOO_CARD)
    os.environ[_GLOO_CARD] = card.interface
    try:
        yield
    finally:
        if before is None:
            del os.environ[_GLOO_CARD]
        else:
            os.environ[_GLOO_CARD] = before


def group_options(
    backend: str, cluster: Cluster | None, card: Nic | None, timeout: timedelta | None = None, ctas: int | None = None
) -> Any:
    """Return torch's options for a group that uses `card`, None for the defaults.

    NCCL's own streams come before the computation's. It takes a network for each communicator, but reads its socket
    interfaces once per process; `connect` sets them. timeout: that of the group; torch warns where they differ.
    ctas: the most that a kernel takes; None for NCCL's choice.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout
    if ctas is not None:
        options.config.min_ctas, options.config.max_ctas = 1, ctas
    if (net := nccl_net(cluster, card)) is not None:
        # torch's type stubs lack this field.
        options.config.net_name = net  # type: ignore[attr-defined]
    return options
