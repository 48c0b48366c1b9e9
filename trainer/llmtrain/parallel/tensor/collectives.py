"""What tensor-parallel ranks exchange. A collective is begun at once and waited for where its result is needed."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from llmtrain.comm.activity import Activity
from llmtrain.comm.collectives import Collectives, Work
from llmtrain.sharding.traffic import Traffic
from llmtrain.sharding.weights import Count


@dataclass(frozen=True)
class Pending:
    """A collective that has started: `finish` returns the result once `work` is done. activity: records the waiting."""

    finish: Callable[[], Tensor]
    work: Work | None = None
    activity: Activity | None = None

    def wait(self) -> Tensor:
        """Return the result; on CUDA, what is queued next comes after it and the host goes on."""
        if self.work is not None:
            self.work.wait() if self.activity is None else self.activity.wait(self.work.wait)
        return self.finish()


@dataclass(frozen=True)
class TensorMesh:
    """The ranks that share every layer's matrices, as one of them sees them.

    place: of this rank among `degree`. collectives: in order of their places; None for one rank alone. sequence:
    whether they share the rest of a layer along the sequence (Korthikanti et al. 2022, section 4.2.2): what a rank
    holds of `[batch, sequence, ...]` is then `[batch, sequence / degree, ...]`. tier: the slowest link between them.
    count: told of every collective. activity: told of waiting for them.

    What is gathered from shards comes rank by rank, `[degree * batch, sequence / degree, ...]`: products and
    nonlinearities take tokens in any order, so it is brought into the order of the sequence for attention alone.
    """

    place: int = 0
    degree: int = 1
    collectives: Collectives | None = None
    sequence: bool = False
    tier: str = "all"
    count: Count = lambda calls: None
    activity: Activity = field(default_factory=Activity)

    @property
    def sharded(self) -> bool:
        """Whether tokens are shared out among the ranks outside of products."""
        return self.sequence and self.degree > 1

    def gather(self, x: Tensor) -> Pending:
        """Begin to bring all tokens together, rank by rank, out of every rank's `x`; or to give `x` as it is where
        it has them all."""
        return self.all_gather(x) if self.sharded else Pending(lambda: x)

    def reduce(self, x: Tensor) -> Pending:
        """Begin to sum every rank's `x`, which it overwrites: all tokens, rank by rank, to this rank's where they are
        sharded."""
        if self.degree == 1:
            return Pending(lambda: x)
        return self.reduce_scatter(x) if self.sharded else self.all_reduce(x)

    def by_rank(self, x: Tensor) -> Tensor:
        """Return `[batch, sequence, ...]` rank by rank where tokens are sharded; without a copy for a batch of 1."""
        if not self.sharded:
            return x
        return x.unflatten(1, (self.degree, -1)).transpose(0, 1).flatten(0, 1)

    def by_sequence(self, x: Tensor) -> Tensor:
        """Return what `by_rank` was given."""
        if not self.sharded:
            return x
        return x.unflatten(0, (self.degree, -1)).transpose(0, 1).flatten(1, 2)

    def close(self) -> None:
        """Leave the process group."""
        if self.collectives is not None:
            self.collectives.close()

    def all_reduce(self, x: Tensor) -> Pending:
        """Start to sum `x` over the ranks, in place."""
        x, collectives = x.contiguous(), self._connected()
        self._count("all_reduce", x.nbytes, collectives.all_reduce_bytes(x.nbytes))
        return Pending(lambda: x, collectives.all_reduce(x), self.activity)

    def all_gather(self, x: Tensor) -> Pending:
        """Start to join every rank's `x` along dim 0."""
        parts = x.new_empty(self.degree, *x.shape)
        parts[self.place].copy_(x)
        self._count("all_gather", parts.nbytes, x.nbytes * (self.degree - 1))
        return Pending(lambda: parts.flatten(0, 1), self._connected().all_gather(parts.view(-1)), self.activity)

    def reduce_scatter(self, x: Tensor) -> Pending:
        """Start to sum `x` over the ranks; each rank keeps its part along dim 0."""
        x = x.contiguous()
        part = x.new_empty(x.shape[0] // self.degree, *x.shape[1:])
        self._count("reduce_scatter", x.nbytes, part.nbytes * (self.degree - 1))
        work = self._connected().reduce_scatter(x.view(-1), part.view(-1), x.dtype)
        return Pending(lambda: part, work, self.activity)

    def _connected(self) -> Collectives:
        assert self.collectives is not None
        return self.collectives

    def _count(self, op: str, size: int, sent: int) -> None:
        self.count([Traffic("tensor", op, self.tier, size, sent, packed=False)])
