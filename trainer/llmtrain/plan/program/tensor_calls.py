"""The collectives inside of layers that tensor parallelism shards, pass by pass. No torch in here.

Without sequence parallelism, each pair of sharded products ends with a sum over the ranks. With it, tokens are gathered
before the pair and reduced to each rank's share behind it (Korthikanti et al. 2022, section 4.2.2).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

from llmtrain_kernels.cross_entropy.chunks import chunk_rows

from llmtrain.cluster.layout import Axis
from llmtrain.plan.pipeline.actions import Kind
from llmtrain.plan.pipeline.stage_layout import StageLayout
from llmtrain.plan.plan import Plan

Operation = Literal["all_gather", "reduce_scatter", "all_reduce"]
Sized = tuple[Operation, int]
"""A collective: its operation, and the bytes of the full tensor."""


@dataclass(frozen=True)
class TensorCalls:
    """The collectives of a plan's tensor-parallel ranks."""

    plan: Plan

    def of(self, kind: Kind, layout: StageLayout, defers: bool) -> Iterator[Sized]:
        """Yield the collectives of a pass of one stage.

        defers: whether the backward pass of the weights is separate from that of the inputs, in the same action or in
        another one.
        """
        if self.plan.grid.degree(Axis.TENSOR) == 1:
            return
        blocks = layout.end - layout.first
        if kind is Kind.F:
            yield from self.forward(layout)
            if layout.closes:
                yield from self.loss(trains=True)
        elif kind is Kind.B:
            yield from self._recomputed(blocks, len(layout.groups))
            yield from self._gathers(2 * blocks)
            yield from self._reductions(2 * blocks)
            # Autograd computes the embedding's gradient in the backward pass of the inputs.
            yield from self._gathers(1 if layout.opens else 0)
            if not defers:
                yield from self._gathers(2 * blocks)
        else:
            # Each product gathers its other operand once more.
            yield from self._gathers(4 * blocks)

    def forward(self, layout: StageLayout) -> Iterator[Sized]:
        """Yield the collectives of a stage's forward pass without the loss."""
        blocks = layout.end - layout.first
        yield from self._reductions(1 if layout.opens else 0)
        yield from self._gathers(2 * blocks)
        yield from self._reductions(2 * blocks)

    def loss(self, trains: bool) -> Iterator[Sized]:
        """Yield the collectives of the output projection and the loss, chunk by chunk of tokens.

        trains: whether the gradient of its input is computed too; an evaluation has none.
        """
        plan, tensor = self.plan, self.plan.grid.degree(Axis.TENSOR)
        shares = tensor if plan.sequence_parallel else 1
        own = plan.batch.microbatch * plan.batch.sequence_length // shares
        step = max(1, chunk_rows(plan.device, -(-plan.model.vocab // tensor)) // shares)
        for first in range(0, own, step):
            rows = min(step, own - first) * shares
            activation = rows * plan.model.hidden * plan.compute_bytes
            if plan.sequence_parallel:
                yield "all_gather", activation
            # Each rank's largest logit, its sum of exponentials and the target's logit, in fp32.
            yield "all_gather", 3 * 4 * rows * tensor
            if trains:
                yield self._reduction, activation

    @property
    def _activation(self) -> int:
        """Bytes of all tokens' activations between layers, of one microbatch."""
        batch = self.plan.batch
        return batch.microbatch * batch.sequence_length * self.plan.model.hidden * self.plan.compute_bytes

    def _gathers(self, count: int) -> Iterator[Sized]:
        if self.plan.sequence_parallel:
            yield from repeat(("all_gather", self._activation), count)

    def _reductions(self, count: int) -> Iterator[Sized]:
        yield from repeat((self._reduction, self._activation), count)

    @property
    def _reduction(self) -> Operation:
        return "reduce_scatter" if self.plan.sequence_parallel else "all_reduce"

    def _recomputed(self, blocks: int, groups: int) -> Iterator[Sized]:
        """Yield the collectives of recomputed forward passes. The last product of a group is not recomputed, unless
        dropout needs it."""
        if not groups:
            return
        yield from self._gathers(2 * blocks)
        yield from self._reductions(2 * blocks - (0 if self.plan.model.dropout else groups))
