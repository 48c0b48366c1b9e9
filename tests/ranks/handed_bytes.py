"""Counts the bytes that a rank hands over for other ranks, by purpose and group, around torch.distributed and where
slots of shared memory are written. Nothing here knows the plan."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from llmtrain.comm.messages_shared import SharedMemoryMessages
from llmtrain.comm.shared_memory import SharedMemoryCollectives
from llmtrain.sharding.weight_gathers import SharedShards
from torch import Tensor

from tests.ranks.handed import Handed
from tests.ranks.purposes import Purposes

MESSAGES = "messages"
TOLD = "told"


@contextmanager
def bytes_handed() -> Iterator[Handed]:
    """Count bytes until the block ends: by purpose and the ranks of the group, and of messages between stages
    together."""
    found: Handed = Counter()
    lock, purposes = threading.Lock(), Purposes()

    def counting(owner: Any, name: str, handed: Callable[..., tuple[str, int]]) -> Any:
        inner = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            key, nbytes = handed(*args, **options)
            with lock:
                found[key if key in (MESSAGES, TOLD) else f"{purposes.now} {key}"] += nbytes
            return inner(*args, **options)

        return mock.patch.object(owner, name, call)

    with ExitStack() as patches:
        for owner, name, handed in WRAPPED:
            patches.enter_context(counting(owner, name, handed))
        patches.enter_context(purposes.named())
        yield found
    del found[TOLD]


def _ranks(group: dist.ProcessGroup | None) -> tuple[str, int]:
    members = dist.get_process_group_ranks(group)
    return ",".join(map(str, members)), len(members)


def _for_others(nbytes: int, count: int) -> int:
    return nbytes // count * (count - 1)


def _exchanged(received: Tensor, sent: Tensor, *, group: Any = None, **options: Any) -> tuple[str, int]:
    name, count = _ranks(group)
    # A byte for each rank tells that slots of shared memory are filled.
    return TOLD if sent.nbytes == count else name, _for_others(sent.nbytes, count)


def _gathered(parts: list[Tensor], own: Tensor, *, group: Any = None, **options: Any) -> tuple[str, int]:
    """torch's own gather, counted as a ring."""
    name, count = _ranks(group)
    return name, own.nbytes * (count - 1)


def _summed(x: Tensor, *, group: Any = None, **options: Any) -> tuple[str, int]:
    """torch's own sum, counted as a ring."""
    name, count = _ranks(group)
    return name, 2 * x.nbytes * (count - 1) // count


def _sent(values: Tensor, *peer: int, group: Any = None, **options: Any) -> tuple[str, int]:
    """A message between stages names its peer by place; a part of a collective names it within the group."""
    return MESSAGES if peer else _ranks(group)[0], values.nbytes


def _slot_gathered(own: SharedMemoryCollectives, parts: list[Tensor]) -> tuple[str, int]:
    name, count = _ranks(own.group)
    return name, parts[0].nbytes * (count - 1)


def _slot_exchanged(own: SharedMemoryCollectives, received: Tensor, sent: Tensor) -> tuple[str, int]:
    name, count = _ranks(own.group)
    return name, _for_others(sent.nbytes, count)


def _slot_reduced(own: SharedMemoryCollectives, rows: Tensor, total: Tensor, wire: torch.dtype) -> tuple[str, int]:
    name, count = _ranks(own.group)
    return name, _for_others(rows.numel() * wire.itemsize, count)


def _slot_summed(own: SharedMemoryCollectives, x: Tensor) -> tuple[str, int]:
    name, count = _ranks(own.group)
    return name, x.nbytes * (count - 1)


def _shards_read(own: SharedShards, buffer: Tensor, workspace: Any) -> tuple[str, int]:
    """Shards in shared memory are handed over by being read: as many bytes as each of the others reads here."""
    name, count = _ranks(own._hop.collectives.group)
    return name, _for_others(buffer.nbytes, count)


def _message_sent(own: SharedMemoryMessages, channel: Any, values: Tensor) -> tuple[str, int]:
    return MESSAGES, values.nbytes


WRAPPED: list[tuple[Any, str, Callable[..., tuple[str, int]]]] = [
    (dist, "all_to_all_single", _exchanged),
    (dist, "all_gather", _gathered),
    (dist, "all_reduce", _summed),
    (dist, "isend", _sent),
    (SharedMemoryCollectives, "_gather", _slot_gathered),
    (SharedMemoryCollectives, "_exchange", _slot_exchanged),
    (SharedMemoryCollectives, "_reduce", _slot_reduced),
    (SharedMemoryCollectives, "_sum", _slot_summed),
    (SharedShards, "steps", _shards_read),
    (SharedMemoryMessages, "send", _message_sent),
]
