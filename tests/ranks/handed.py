"""Counts what a step hands to collectives and messages, below the code that plans them.

Nothing here knows the plan. `handed` wraps the methods of `Collectives`, the memory that ranks share, and `Messages`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from llmtrain.comm.gloo import GlooCollectives
from llmtrain.comm.shared_memory import SharedMemoryCollectives
from llmtrain.parallel.pipeline.transport import Transport
from llmtrain.sharding.weight_gathers import SharedShards

Handed = Counter[str]
"""Counts by text: operation, ranks of the group, bytes of the whole tensor."""


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


def _said(op: str, own: Any, nbytes: int) -> str:
    return text(op, tuple(dist.get_process_group_ranks(own.group)), nbytes)
