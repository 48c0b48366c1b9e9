"""The buffers that collectives need in addition to their arguments, by backend. No torch in here.

`llmtrain.comm` asks the same functions, so that what it allocates and what a plan counts are equal.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from llmtrain.plan.facts import Device
from llmtrain.plan.placement import PAGE

CollectiveBackend = Literal["nccl", "shared", "gloo"]
"""NCCL between GPUs; memory that the CPUs of a node share; gloo between other CPUs."""

ONE_ROUND = 2**20
"""Up to this many bytes per rank, the ranks of an all-reduce over gloo send each other their full tensors. gloo's ring
sends less, but in many messages that wait for each other: small tensors take two to four times as long."""

MESSAGE_CTAS = 4
"""The most CTAs of a message between pipeline stages. A receive that is posted ahead occupies them until its message
arrives, beside the computation."""

LANE_CTAS = 16
"""The most CTAs of a gather or a reduction of model states, which run beside the computation and beside each other.
NCCL's own choice is up to 32 of the 132 multiprocessors of an H100. Kernels that wait for other ranks have to fit a GPU
at the same time, as CUDA promises no turns (NCCL user guide, "Using multiple NCCL communicators concurrently"). Neither
limit is measured on a GPU yet."""

CTAS = 32
"""NCCL's own choice, at most."""

COLLECTIVE_SLOT_BYTES = 8 << 20
"""Most bytes of a shared-memory slot: what a rank passes to the others in one round."""


def backend_of(device: Device, ranks: Sequence[int], node: int) -> CollectiveBackend:
    """Return the backend of a group's collectives, if its CPUs can share memory. ranks: of the group. node: ranks of a
    node."""
    if device == "cuda":
        return "nccl"
    return "shared" if len({rank // node for rank in ranks}) == 1 and len(ranks) > 1 else "gloo"


def in_one_round(nbytes: int, ranks: int) -> bool:
    """Return whether gloo's ranks send each other all of a tensor of `nbytes` at the same time."""
    return nbytes * (ranks - 1) <= ONE_ROUND


@dataclass(frozen=True, slots=True)
class SizedCollective:
    """A collective. size: bytes of the full tensor, as it is sent. element: bytes of an element on the wire.

    reduce_scatter, converted: its values have another dtype than the wire. all_to_all: it sends packed values, which
    come from a buffer and go to another one. all_gather, shards: it gathers weight shards, which ranks of one node read
    directly.
    """

    op: Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]
    size: int
    element: int = 1
    converted: bool = False
    shards: bool = False

    def workspace(self, backend: CollectiveBackend, ranks: int, in_order: bool) -> Iterator[tuple[str, int]]:
        """Yield the name and the bytes of each buffer. in_order: whether gathered parts are in the order of ranks."""
        if self.op == "all_to_all":
            yield from (("sent", self.size), ("received", self.size))
        elif backend == "nccl":
            yield from self._of_nccl(in_order)
        elif backend == "gloo":
            yield from self._of_gloo(ranks, in_order)

    def round_bytes(self, ranks: int) -> int:
        """Return what a rank passes to the others through shared memory, if its slot has room for all of it."""
        if self.op == "all_gather":
            return 0 if self.shards else self.size // ranks
        return self.size

    def _of_nccl(self, in_order: bool) -> Iterator[tuple[str, int]]:
        if self.op == "all_gather" and not in_order:
            yield "gathered", self.size
        # NCCL adds fp32 numbers by itself.
        if self.op == "reduce_scatter" and self.element < 4:
            yield from self._exchanged()

    def _of_gloo(self, ranks: int, in_order: bool) -> Iterator[tuple[str, int]]:
        if self.op == "reduce_scatter":
            yield from self._exchanged()
        elif self.op == "all_gather":
            if in_order and ranks > 2 and in_one_round(self.size // ranks, ranks):
                yield "sent", self.size
        elif in_one_round(self.size, ranks):
            yield "gathered", self.size * ranks
            if ranks > 2:
                yield "sent", self.size * ranks

    def _exchanged(self) -> Iterator[tuple[str, int]]:
        yield "received", self.size
        if self.converted:
            yield "sent", self.size


@dataclass(frozen=True)
class CollectiveBuffers:
    """What a process group's collectives need. ranks: number of ranks of the group. collectives: every kind and size of
    them. sequential: whether one runs after another; several may be under way otherwise, each with buffers of its own.
    in_order: see SizedCollective."""

    ranks: int
    collectives: frozenset[SizedCollective] = frozenset()
    sequential: bool = True
    in_order: bool = True

    def workspace(self, backend: CollectiveBackend) -> dict[str, int]:
        """Return the bytes of each buffer of the group's workspace, by name; it has none if not `sequential`."""
        every = (one.workspace(backend, self.ranks, self.in_order) for one in self.collectives if self.sequential)
        return most(item for items in every for item in items)

    @property
    def slots(self) -> int:
        """Shared-memory slots of each rank: two for each collective that may be under way."""
        return 2 if self.sequential else 4

    @property
    def slot_bytes(self) -> int:
        """Bytes of a shared-memory slot. A collective that passes more takes several rounds."""
        passed = max((one.round_bytes(self.ranks) for one in self.collectives), default=0)
        return min(max(-(-passed // PAGE), 1) * PAGE, COLLECTIVE_SLOT_BYTES)

    def nbytes(self, backend: CollectiveBackend) -> int:
        """Return the bytes of the workspace and of the slots."""
        slots = self.slots * self.slot_bytes if backend == "shared" else 0
        return sum(self.workspace(backend).values()) + slots


def most(sized: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the largest size of each name, without those of size 0."""
    found: dict[str, int] = {}
    for name, size in sized:
        if size:
            found[name] = max(size, found.get(name, 0))
    return found
