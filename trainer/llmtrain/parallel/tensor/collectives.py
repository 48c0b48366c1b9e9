"""Collectives of tensor-parallel ranks. Each one starts immediately and is waited for where its result is needed."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from llmtrain.comm.activity import Activity
from llmtrain.comm.collectives import Collectives
from llmtrain.comm.waits import Ticket
from llmtrain.plan.traffic import CountTraffic, Traffic

CountCollective = Callable[[str, int, int], None]
"""Takes each collective's operation, the bytes of the full tensor, and the bytes that this rank sends."""


def count_as_tensor(count: CountTraffic, tier: str) -> CountCollective:
    """Return a function that reports collectives to `count` as tensor-parallel traffic over the links of `tier`."""
    return lambda op, size, sent: count([Traffic("tensor", op, tier, size, sent, packed=False)])


@dataclass(frozen=True)
class Pending:
    """A collective that has started: `finish` returns the result once `work` is done. activity: records the waiting."""

    finish: Callable[[], Tensor]
    work: Ticket | None = None
    activity: Activity | None = None

    def wait(self) -> Tensor:
        """Return the result, with the shape and dtype that the collective documents. On CUDA the current stream waits
        for it, and the host continues."""
        if self.work is not None:
            self.work.wait() if self.activity is None else self.activity.wait(self.work.wait)
        return self.finish()


@dataclass(frozen=True)
class TensorMesh:
    """The tensor-parallel ranks, which shard every layer's matrices, from the view of one of them.

    tensor_rank: this rank among `degree`. collectives: of these ranks, in their order; None for one rank. sequence:
    whether they shard the tokens outside of matrix products (sequence parallelism, Korthikanti et al. 2022, section
    4.2.2). A rank then holds `[batch, sequence / degree, ...]` of `[batch, sequence, ...]`. count: called for each
    collective. activity: records the time spent waiting.

    Gathered tokens come rank by rank, `[degree * batch, sequence / degree, ...]`. Matrix products and nonlinearities
    take tokens in any order, so only attention needs them in the order of the sequence.
    """

    tensor_rank: int = 0
    degree: int = 1
    collectives: Collectives | None = None
    sequence: bool = False
    count: CountCollective = lambda op, size, sent: None
    activity: Activity = field(default_factory=Activity)

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of the tokens outside of matrix products."""
        return self.sequence and self.degree > 1

    def gather(self, x: Tensor) -> Pending:
        """Start to gather the tokens of every rank's `x`, `[batch, sequence / degree, ...]` of any dtype, rank by rank.
        Without sharded tokens the result is `x`."""
        return self.all_gather(x) if self.sharded else Pending(lambda: x)

    def reduce(self, x: Tensor) -> Pending:
        """Start to sum every rank's `x`, of any float dtype, which it overwrites. Without sharded tokens the result has
        the shape of `x`. With sharded tokens, `x` is `[degree * batch, sequence / degree, ...]`, rank by rank, and the
        result is `[batch, sequence / degree, ...]`, this rank's tokens."""
        if self.degree == 1:
            return Pending(lambda: x)
        return self.reduce_scatter(x) if self.sharded else self.all_reduce(x)

    def by_rank(self, x: Tensor) -> Tensor:
        """Reorder `[batch, sequence, ...]`, of any dtype, to `[degree * batch, sequence / degree, ...]`, rank by rank,
        if tokens are sharded. A batch of 1 needs no copy."""
        if not self.sharded:
            return x
        return x.unflatten(1, (self.degree, -1)).transpose(0, 1).flatten(0, 1)

    def by_sequence(self, x: Tensor) -> Tensor:
        """Reorder `[degree * batch, sequence / degree, ...]`, of any dtype, to `[batch, sequence, ...]`: undo
        `by_rank`."""
        if not self.sharded:
            return x
        return x.unflatten(0, (self.degree, -1)).transpose(0, 1).flatten(1, 2)

    def close(self) -> None:
        """Leave the process group."""
        if self.collectives is not None:
            self.collectives.close()

    def all_reduce(self, x: Tensor) -> Pending:
        """Start to sum `x`, of any shape and float dtype, over the ranks, in place."""
        x, collectives = x.contiguous(), self._connected()
        self.count("all_reduce", x.nbytes, collectives.all_reduce_bytes(x.nbytes))
        return Pending(lambda: x, collectives.all_reduce(x), self.activity)

    def all_gather(self, x: Tensor) -> Pending:
        """Start to join every rank's `x`, `[n, ...]` of any dtype, along dim 0: `[degree * n, ...]`."""
        parts = x.new_empty(self.degree, *x.shape)
        parts[self.tensor_rank].copy_(x)
        self.count("all_gather", parts.nbytes, x.nbytes * (self.degree - 1))
        return Pending(lambda: parts.flatten(0, 1), self._connected().all_gather(parts.view(-1)), self.activity)

    def reduce_scatter(self, x: Tensor) -> Pending:
        """Start to sum `x`, `[degree * n, ...]` of any float dtype, over the ranks in fp32. Each rank keeps its part
        along dim 0, `[n, ...]`."""
        x = x.contiguous()
        part = x.new_empty(x.shape[0] // self.degree, *x.shape[1:])
        self.count("reduce_scatter", x.nbytes, part.nbytes * (self.degree - 1))
        work = self._connected().reduce_scatter(x.view(-1), part.view(-1), x.dtype)
        return Pending(lambda: part, work, self.activity)

    def _connected(self) -> Collectives:
        assert self.collectives is not None
        return self.collectives
