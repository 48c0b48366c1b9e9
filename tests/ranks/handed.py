"""Counts what a step hands to collectives and messages, below the code that plans them.

Nothing here knows the plan. `handed` wraps the methods of `Collectives`, the memory that ranks share, and `Messages`;
`bytes_handed` wraps what is below them: torch.distributed, and
the slots of shared memory.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from llmtrain.comm.gloo import GlooCollectives
from llmtrain.comm.messages_shared import SharedMemoryMessages
from llmtrain.comm.shared_memory import SharedMemoryCollectives
from llmtrain.parallel.pipeline.transport import Transport
from llmtrain.sharding.weight_gathers import SharedShards

Handed = Counter[str]
"""Counts by text: operation, ranks of the group, bytes of the whole tensor."""
MESSAGES = "messages"
TOLD = "told"


def text(op: str, ranks: tuple[int, ...], nbytes: int) -> str:
    """Return the text by which a call is counted."""
    return f"{op} {','.join(map(str, ranks))} {nbytes}"


@contextmanager
def handed() -> Iterator[Handed]:
    """Count calls until the block ends."""
    found: Handed = Counter()
    wrapped: list[tuple[type, str, Any]] = []

    def wrap(owner: type, name: str, count: Callable[..., str]) -> None:
        inner = getattr(owner, name)

        def counting(self: Any, *args: Any) -> Any:
            found[count(self, *args)] += 1
            return inner(self, *args)

        wrapped.append((owner, name, inner))
        setattr(owner, name, counting)

    for backend in (GlooCollectives, SharedMemoryCollectives):
        wrap(backend, "all_gather", lambda own, whole: _said("all_gather", own, whole.nbytes))
        wrap(backend, "all_to_all", lambda own, received, sent: _said("reduce", own, sent.nbytes))
        wrap(backend, "all_reduce", lambda own, x: _said("all_reduce", own, x.nbytes))
        wrap(
            backend,
            "reduce_scatter",
            lambda own, values, total, wire: _said("reduce", own, values.numel() * wire.itemsize),
        )
    wrap(SharedShards, "steps", lambda own, buffer, workspace: _said("all_gather", own._hop.collectives, buffer.nbytes))
    wrap(Transport, "send", lambda own, channel, values: f"send {values.nbytes}")
    try:
        yield found
    finally:
        for owner, name, inner in wrapped:
            setattr(owner, name, inner)


@contextmanager
def bytes_handed() -> Iterator[Handed]:
    """Count the bytes that this rank hands over for other ranks, until the block ends: by the ranks of the group, and
    of messages between stages together. Counted around torch.distributed and where slots of shared memory are written.

    A gather or a sum of torch's own is counted as a ring. Shards in shared memory are counted where others' are read.
    """
    found: Handed = Counter()
    lock = threading.Lock()

    def counting(owner: Any, name: str, handed: Callable[..., tuple[str, int]]) -> Any:
        inner = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            key, nbytes = handed(*args, **options)
            with lock:
                found[key] += nbytes
            return inner(*args, **options)

        return mock.patch.object(owner, name, call)

    def ranks(group: Any) -> tuple[str, int]:
        members = dist.get_process_group_ranks(group)
        return ",".join(map(str, members)), len(members)

    def exchanged(received: Any, sent: Any, *, group: Any = None, **options: Any) -> tuple[str, int]:
        name, count = ranks(group)
        # A byte for each rank tells that slots of shared memory are filled.
        return (TOLD if sent.nbytes == count else name), sent.nbytes // count * (count - 1)

    def gathered(parts: Any, own: Any, *, group: Any = None, **options: Any) -> tuple[str, int]:
        name, count = ranks(group)
        return name, own.nbytes * (count - 1)

    def summed(x: Any, *, group: Any = None, **options: Any) -> tuple[str, int]:
        name, count = ranks(group)
        return name, 2 * x.nbytes * (count - 1) // count

    def sent(values: Any, *peer: Any, group: Any = None, **options: Any) -> tuple[str, int]:
        return MESSAGES if peer else ranks(group)[0], values.nbytes

    def written(share: Callable[..., int]) -> Callable[..., tuple[str, int]]:
        def handed(own: Any, *args: Any) -> tuple[str, int]:
            name, count = ranks(own.group)
            return name, share(count, *args)

        return handed

    def read(own: Any, buffer: Any, *workspace: Any) -> tuple[str, int]:
        name, count = ranks(own._hop.collectives.group)
        return name, buffer.nbytes // count * (count - 1)

    def reduced(count: int, rows: Any, total: Any, wire: Any) -> int:
        return rows.numel() * wire.itemsize // count * (count - 1)

    slots = SharedMemoryCollectives
    with (
        counting(dist, "all_to_all_single", exchanged),
        counting(dist, "all_gather", gathered),
        counting(dist, "all_reduce", summed),
        counting(dist, "isend", sent),
        counting(slots, "_gather", written(lambda count, parts: parts[0].nbytes * (count - 1))),
        counting(slots, "_exchange", written(lambda count, received, sent: sent.nbytes // count * (count - 1))),
        counting(slots, "_reduce", written(reduced)),
        counting(slots, "_sum", written(lambda count, x: x.nbytes * (count - 1))),
        counting(SharedShards, "steps", read),
        counting(SharedMemoryMessages, "send", lambda own, channel, values: (MESSAGES, values.nbytes)),
    ):
        yield found
    del found[TOLD]


def _said(op: str, own: Any, nbytes: int) -> str:
    return text(op, tuple(dist.get_process_group_ranks(own.group)), nbytes)
