"""Layers that are sharded over tensor-parallel ranks. Their parameters have the names of the plain layers' parameters.

After Megatron-LM (Shoeybi et al. 2019, section 3) and Korthikanti et al. 2022, section 4.2.2 (sequence parallelism).
Weight gradients can be deferred (`llmtrain.parallel.weight_gradients`).
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from llmtrain_kernels.matmul import Product, linear, matmul
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from llmtrain.cluster.layout import even_share
from llmtrain.comm.device import own_generators
from llmtrain.model.config import GPTConfig
from llmtrain.model.layers import Attention, Embedding, empty_parameter
from llmtrain.parallel.tensor.collectives import TensorMesh
from llmtrain.parallel.weight_gradients import WeightGradientQueue


class _ParallelLinear(nn.Module):
    """Affine map with one dim of its weight sharded over the ranks.

    ordered: whether the activations that the ranks shard by features have their tokens in the order of the sequence;
    otherwise, where tokens are sharded, they are rank by rank (see TensorMesh).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        mesh: TensorMesh,
        queue: WeightGradientQueue,
        ordered: bool = False,
    ) -> None:
        super().__init__()
        self.mesh, self.queue, self.ordered = mesh, queue, ordered
        weight, bias_size = self._shapes(inputs, outputs, mesh.degree)
        self.weight = empty_parameter(*weight)
        self.bias = empty_parameter(bias_size) if bias else None

    @staticmethod
    def _shapes(inputs: int, outputs: int, degree: int) -> tuple[tuple[int, int], int]:
        """Return the shape of this rank's weight, and the size of its bias."""
        raise NotImplementedError

    def _by_rank(self, x: Tensor) -> Tensor:
        return self.mesh.by_rank(x) if self.ordered else x

    def _by_sequence(self, x: Tensor) -> Tensor:
        return self.mesh.by_sequence(x) if self.ordered else x


class ColumnParallelLinear(_ParallelLinear):
    """Affine map of which this rank has a share of the outputs: weight `[outputs / degree, inputs]`."""

    @staticmethod
    def _shapes(inputs: int, outputs: int, degree: int) -> tuple[tuple[int, int], int]:
        return (outputs // degree, inputs), outputs // degree

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's tokens, `[batch, sequence or a share of it, inputs]` of the weight's dtype, to all tokens,
        `[..., outputs / degree]`."""
        return _Column.apply(x, self.weight, self.bias, self)


class RowParallelLinear(_ParallelLinear):
    """Affine map of which this rank has a share of the inputs: weight `[inputs / degree, outputs]`, and all of the
    bias."""

    @staticmethod
    def _shapes(inputs: int, outputs: int, degree: int) -> tuple[tuple[int, int], int]:
        return (inputs // degree, outputs), outputs

    def forward(self, x: Tensor) -> Tensor:
        """Map all tokens, `[..., inputs / degree]` of the weight's dtype, to this rank's tokens, `[batch, sequence or a
        share of it, outputs]`."""
        # The node of the backward pass comes before the product. Autograd saves a function's tensors once the function
        # has run, and recomputation of a checkpoint stops at the last tensor that was saved. This product is the last
        # one of a block, so it is not recomputed.
        node = _RowBackward.apply(x, self.weight, self.bias, self)
        bias = None if self.bias is None else self.bias.detach()
        return _RowForward.apply(node, x.detach(), self.weight.detach(), bias, self)


class ParallelAttention(Attention):
    """Attention with this rank's share of the heads."""

    def __init__(self, config: GPTConfig, mesh: TensorMesh, queue: WeightGradientQueue) -> None:
        super().__init__(config)
        bias = config.family != "llama"
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.mesh, self.heads = mesh, config.heads // mesh.degree
        self.qkv = ColumnParallelLinear(config.hidden, width, bias, mesh, queue, ordered=True)  # type: ignore[assignment]
        self.out = RowParallelLinear(config.hidden, config.hidden, bias, mesh, queue, ordered=True)  # type: ignore[assignment]

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Map this rank's tokens, `[batch, sequence or a share of it, hidden]` of the weights' dtype, to the same shape
        and dtype."""
        if not (self.training and self.dropout) or self.mesh.degree == 1 or self.mesh.sharded:
            return super().forward(x, rotary)
        # All ranks draw the same random numbers, because residual dropout must drop the same elements on each of them.
        # Each rank's heads need numbers of their own.
        seed = int(torch.randint(1 << 62, ()))
        with torch.random.fork_rng(own_generators(x.device)):
            torch.manual_seed(seed + self.mesh.tensor_rank)
            return super().forward(x, rotary)


class VocabParallelEmbedding(Embedding):
    """Embedding of which this rank has a share of the vocabulary, and all positions."""

    def __init__(self, config: GPTConfig, mesh: TensorMesh) -> None:
        super().__init__(config)
        self.mesh = mesh
        self.start, end = even_share(config.vocab, mesh.degree, mesh.tensor_rank)
        self.tokens = empty_parameter(end - self.start, config.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 `[batch, sequence]` to this rank's tokens `[batch, sequence or a share of it, hidden]`."""
        x = _Embed.apply(tokens, self.tokens, self.start, self.mesh)
        if self.positions is not None:
            first = self.mesh.tensor_rank * x.shape[1] if self.mesh.sharded else 0
            x = x + self.positions[first : first + x.shape[1]]
        return self.dropout(x)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: ColumnParallelLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return layer._by_sequence(linear(layer.mesh.gather(x).wait(), weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, mesh, (x, weight) = ctx.layer, ctx.layer.mesh, _without_graph(ctx)
        grad = layer._by_rank(grad)

        def begin() -> Product:
            # The other ranks' inputs arrive while something else is computed.
            gathering = mesh.gather(x)
            return lambda: matmul(_rows(grad).t(), _rows(gathering.wait()))

        product = layer.queue.begin(layer.weight, begin)
        reduced = mesh.reduce(matmul(grad, weight))
        # The sum over the ranks runs during this product.
        grad_weight, grad_bias = product(), None
        if layer.bias is not None:
            grad_bias = layer.queue.begin(layer.bias, lambda: partial(_rows(grad).sum, 0))()
        return reduced.wait(), grad_weight, grad_bias, None


class _RowBackward(torch.autograd.Function):
    """Computes the gradients of a row-parallel product. Its output has the shape of the product and takes no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: RowParallelLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        batch, sequence, degree = *x.shape[:2], layer.mesh.degree if layer.mesh.sharded else 1
        shape = (batch, sequence // degree) if layer.ordered else (batch // degree, sequence)
        return x.new_empty(()).expand(*shape, weight.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, mesh, (x, weight) = ctx.layer, ctx.layer.mesh, _without_graph(ctx)
        gathering = mesh.gather(grad)
        grad_bias = None if layer.bias is None else _rows(grad).sum(0)
        gathered = gathering.wait()
        grad_x, grad_weight = layer._by_sequence(matmul(gathered, weight.t())), None

        def begin() -> Product:
            # The gradient stays sharded in the queue, so it is gathered a second time.
            again = mesh.gather(grad)
            return lambda: matmul(_rows(layer._by_rank(x)).t(), _rows(again.wait()))

        if layer.queue.active:
            layer.queue.push(layer.weight, begin)
        else:
            grad_weight = matmul(_rows(layer._by_rank(x)).t(), _rows(gathered))
        return grad_x, grad_weight, grad_bias, None


class _RowForward(torch.autograd.Function):
    """Computes a row-parallel product. Its gradient goes to the node of `_RowBackward`."""

    @staticmethod
    def forward(
        ctx: Any, node: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, layer: RowParallelLinear
    ) -> Tensor:
        y = layer.mesh.reduce(matmul(layer._by_rank(x), weight)).wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, start: int, mesh: TensorMesh) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.start, ctx.mesh, ctx.count = start, mesh, weight.shape[0]
        indices, others = _local_rows(mesh.by_rank(tokens), start, weight.shape[0])
        embedded = F.embedding(indices.masked_fill(others, 0), weight).masked_fill_(others.unsqueeze(-1), 0.0)
        return mesh.reduce(embedded).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        (tokens,), mesh, count = ctx.saved_tensors, ctx.mesh, ctx.count
        gathering = mesh.gather(grad)
        indices, others = _local_rows(mesh.by_rank(tokens), ctx.start, count)
        # Other ranks' tokens go to one more row, which is left out as padding.
        indices = indices.masked_fill(others, count)
        rows = torch.ops.aten.embedding_dense_backward(gathering.wait(), indices, count + 1, count, False)
        return None, rows[:count], None, None


def _local_rows(tokens: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Return where this rank holds each token, and which tokens it does not hold."""
    indices = tokens - start
    return indices, (indices < 0) | (indices >= count)


def _without_graph(ctx: Any) -> tuple[Tensor, Tensor]:
    """Return the saved input and weight. The input is detached: a deferred product would else keep the graph before it,
    and with it the stage's input and its gradient."""
    x, weight = ctx.saved_tensors
    return x.detach(), weight


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)
