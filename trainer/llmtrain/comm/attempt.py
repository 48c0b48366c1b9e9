"""The keys of one start of a run's ranks. torchrun keeps one store while it restarts ranks (`--max-restarts`): the keys
of earlier ranks are still in it, the reason of their end and addresses among them."""

import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

# Seconds between two looks for ranks that have come.
_PAUSE = 0.02


def of_this_start(store: dist.Store, rank: int, world: int, patience: timedelta) -> dist.Store:
    """Return the part of a store that only the ranks which start now use. Collective over `world` ranks.

    Each rank brings a name that nobody else has. Rank 0 answers every name with its own, which the keys then begin
    with. Nobody reads an answer to a rank of an earlier start; nor does rank 0 of another run answer. Raises
    dist.DistStoreError if the ranks do not meet within `patience`.
    """
    name = uuid4().hex
    if rank == 0:
        _answer_all(store, name, world, patience)
        return dist.PrefixStore(name, store)
    store.set(f"start/name/{rank}", name)
    answer = f"start/answer/{name}"
    store.wait([answer], patience)
    first = store.get(answer).decode()
    store.delete_key(answer)
    store.add(f"start/{first}", 1)
    return dist.PrefixStore(first, store)


def _answer_all(store: dist.Store, name: str, world: int, patience: timedelta) -> None:
    """Answer the other ranks' names until all others have heard."""
    answered, until = dict[int, bytes](), time.monotonic() + patience.total_seconds()
    while store.add(f"start/{name}", 0) < world - 1:
        for rank in range(1, world):
            key = f"start/name/{rank}"
            if store.check([key]) and (other := store.get(key)) != answered.get(rank):
                answered[rank] = other
                store.set(f"start/answer/{other.decode()}", name)
        if time.monotonic() > until:
            raise dist.DistStoreError(f"{world - 1} ranks were to come")
        time.sleep(_PAUSE)
