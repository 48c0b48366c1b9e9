"""What tensor-parallel ranks exchange. A collective is begun at once and waited for where its result is needed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain.comm.activity import Activity
from llmtrain.comm.small_collectives import begin_gather, begin_sum, in_one_round
from llmtrain.sharding.traffic import Traffic
from llmtrain.sharding.weights import Count

# Its name since torch 2.13, which warns of the old one.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Pending:
    """A collective under way: `finish` makes the result once `work` is done. activity: told of waiting for it."""

    finish: Callable[[], Tensor]
    work: dist.Work | None = None
    activity: Activity | None = None

    def wait(self) -> Tensor:
        """Return the result; on CUDA, what is queued next comes after it and the host goes on."""
        if self.work is not None:
            self.work.wait() if self.activity is None else self.activity.wait(self.work.wait)
        return self.finish()


@dataclass(frozen=True)
class TensorMesh:
    """The ranks that share every layer's matrices, as one of them sees them.

    place: of this rank among `degree`. group: in order of their places; None where there is one rank alone. sequence:
    whether they share the rest of a layer along the sequence (Korthikanti et al. 2022, section 4.2.2): what a rank
    holds of `[batch, sequence, ...]` is then `[batch, sequence / degree, ...]`. tier: the slowest link between them.
    count: told of every collective. activity: told of waiting for them.

    What is gathered from shards comes rank by rank, `[degree * batch, sequence / degree, ...]`: products and
    nonlinearities take tokens in any order, so it is brought into the order of the sequence for attention alone.
    """

    place: int = 0
    degree: int = 1
    group: dist.ProcessGroup | None = None
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
        if self.group is not None:
            dist.destroy_process_group(self.group)

    def all_reduce(self, x: Tensor) -> Pending:
        """Begin to sum `x` over the ranks, in place."""
        x = x.contiguous()
        self._count("all_reduce", x.nbytes, self.degree if in_one_round(x, self.degree) else 2)
        work, finish = begin_sum(x, self.group)
        return Pending(finish, work, self.activity)

    def all_gather(self, x: Tensor) -> Pending:
        """Begin to join every rank's `x` along dim 0."""
        x = x.contiguous()
        parts = x.new_empty(self.degree, *x.shape)
        self._count("all_gather", parts.nbytes, 1)
        return Pending(lambda: parts.flatten(0, 1), begin_gather(parts, x, self.group), self.activity)

    def reduce_scatter(self, x: Tensor) -> Pending:
        """Begin to sum `x` over the ranks; each keeps its part along dim 0."""
        x = x.contiguous()
        self._count("reduce_scatter", x.nbytes, 1)
        if x.is_cuda:
            part = x.new_empty(x.shape[0] // self.degree, *x.shape[1:])
            return Pending(lambda: part, _reduce_scatter(part, x, group=self.group, async_op=True), self.activity)
        # gloo's own reduce-scatter is an all-reduce, which sends twice as much.
        parts = torch.empty_like(x)
        work = dist.all_to_all_single(parts, x, group=self.group, async_op=True)
        return Pending(partial(torch.sum, parts.unflatten(0, (self.degree, -1)), 0), work, self.activity)

    def _count(self, op: str, size: int, passes: int) -> None:
        sent = passes * (size // self.degree) * (self.degree - 1)
        self.count([Traffic("tensor", op, self.tier, size, sent, packed=False)])
