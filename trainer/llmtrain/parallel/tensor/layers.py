"""Parts of a block cut over tensor-parallel ranks, with the names that the plain ones' parameters have.

After Megatron-LM (Shoeybi et al. 2019, section 3) and Korthikanti et al. 2022, section 4.2.2 (sequence parallelism).
Products of weights may be put off (`WeightGradientQueue`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from llmtrain_kernels.matmul import linear, matmul
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from llmtrain.cluster.layout import even_share
from llmtrain.comm.device import own_generators
from llmtrain.model.config import GPTConfig
from llmtrain.model.layers import Attention, Embedding, empty_parameter
from llmtrain.parallel.pipeline.weight_gradient_queue import WeightGradientQueue
from llmtrain.parallel.tensor.collectives import TensorMesh


class ColumnParallelLinear(nn.Module):
    """Affine map of which this rank has a share of the outputs: weight `[outputs / degree, inputs]`.

    ordered: whether the result is in the order of the sequence where tokens are sharded, and not rank by rank.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        mesh: TensorMesh,
        queue: WeightGradientQueue | None,
        ordered: bool = False,
    ) -> None:
        super().__init__()
        self.mesh, self.queue, self.ordered = mesh, queue, ordered
        self.weight = empty_parameter(outputs // mesh.degree, inputs)
        self.bias = empty_parameter(outputs // mesh.degree) if bias else None

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's tokens `[batch, sequence or a share, inputs]` to all tokens' `[..., outputs / degree]`."""
        return _Column.apply(x, self.weight, self.bias, self)


class RowParallelLinear(nn.Module):
    """Affine map of which this rank has a share of the inputs: weight `[inputs / degree, outputs]`; the bias is whole.

    ordered: whether tokens come in the order of the sequence where they are sharded, and not rank by rank.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        mesh: TensorMesh,
        queue: WeightGradientQueue | None,
        ordered: bool = False,
    ) -> None:
        super().__init__()
        self.mesh, self.queue, self.ordered = mesh, queue, ordered
        self.weight = empty_parameter(inputs // mesh.degree, outputs)
        self.bias = empty_parameter(outputs) if bias else None

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """Map all tokens' `[..., inputs / degree]` to this rank's tokens `[batch, sequence or a share, outputs]`."""
        # The backward pass's node comes before the product: autograd keeps what a function saves once it has run, and
        # a checkpoint that recomputes ends there. This product is a block's last, and is then not computed again.
        node = _RowBackward.apply(x, self.weight, self.bias, self)
        bias = None if self.bias is None else self.bias.detach()
        return _RowForward.apply(node, x.detach(), self.weight.detach(), bias, self)


class ParallelAttention(Attention):
    """Attention with this rank's share of the heads."""

    def __init__(self, config: GPTConfig, mesh: TensorMesh, queue: WeightGradientQueue | None) -> None:
        super().__init__(config)
        bias = config.family != "llama"
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.mesh, self.heads = mesh, config.heads // mesh.degree
        self.qkv = ColumnParallelLinear(config.hidden, width, bias, mesh, queue, ordered=True)  # type: ignore[assignment]
        self.out = RowParallelLinear(config.hidden, config.hidden, bias, mesh, queue, ordered=True)  # type: ignore[assignment]

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Map this rank's tokens `[batch, sequence or a share of it, hidden]` to the same shape."""
        if not (self.training and self.dropout) or self.mesh.degree == 1 or self.mesh.sharded:
            return super().forward(x, rotary)
        # All ranks draw the same random numbers, as residual dropout must be the same on them; heads must not be.
        seed = int(torch.randint(1 << 62, ()))
        with torch.random.fork_rng(own_generators(x.device)):
            torch.manual_seed(seed + self.mesh.place)
            return super().forward(x, rotary)


class VocabParallelEmbedding(Embedding):
    """Embedding of which this rank has a share of the tokens; positions are whole."""

    def __init__(self, config: GPTConfig, mesh: TensorMesh) -> None:
        super().__init__(config)
        self.mesh = mesh
        self.start, end = even_share(config.vocab, mesh.degree, mesh.place)
        self.tokens = empty_parameter(end - self.start, config.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 `[batch, sequence]` to this rank's tokens `[batch, sequence or a share of it, hidden]`."""
        x = _Embed.apply(tokens, self.tokens, self.start, self.mesh)
        if self.positions is not None:
            first = self.mesh.place * x.shape[1] if self.mesh.sharded else 0
            x = x + self.positions[first : first + x.shape[1]]
        return self.dropout(x)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: ColumnParallelLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        y = linear(layer.mesh.gather(x).wait(), weight, bias)
        return layer.mesh.by_sequence(y) if layer.ordered else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, mesh, (x, weight) = ctx.layer, ctx.layer.mesh, ctx.saved_tensors
        grad = mesh.by_rank(grad) if layer.ordered else grad

        def begin() -> Callable[[], Tensor]:
            # The inputs that other ranks hold arrive while something else is computed.
            whole = mesh.gather(x)
            return lambda: matmul(_rows(grad).t(), _rows(whole.wait()))

        later = layer.queue is not None and layer.queue.active
        product = None if later else begin()
        reduced = mesh.reduce(matmul(grad, weight))
        # The sum over the ranks is under way while this rank's weights get their gradient.
        grad_weight = _now_or_later(layer.queue, layer.weight, begin, product)
        grad_bias = None
        if layer.bias is not None:
            total = partial(_rows(grad).sum, 0)
            grad_bias = _now_or_later(layer.queue, layer.bias, lambda: total, None if later else total)
        return reduced.wait(), grad_weight, grad_bias, None


class _RowBackward(torch.autograd.Function):
    """Has the gradients of a row-parallel product; its result has the product's shape and no memory."""

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
        layer, mesh, (x, weight) = ctx.layer, ctx.layer.mesh, ctx.saved_tensors
        later = layer.queue is not None and layer.queue.active
        gathered = mesh.gather(grad)
        grad_bias = None if layer.bias is None else _rows(grad).sum(0)
        whole = gathered.wait()
        grad_x = matmul(whole, weight.t())

        def begin() -> Callable[[], Tensor]:
            # Kept sharded until then, and gathered a second time.
            again = mesh.gather(grad)
            return lambda: matmul(_rows(_by_rank(x, layer)).t(), _rows(again.wait()))

        product = None if later else lambda: matmul(_rows(_by_rank(x, layer)).t(), _rows(whole))
        grad_weight = _now_or_later(layer.queue, layer.weight, begin, product)
        return mesh.by_sequence(grad_x) if layer.ordered else grad_x, grad_weight, grad_bias, None


class _RowForward(torch.autograd.Function):
    """Computes a row-parallel product; its gradient goes to the node of `_RowBackward`."""

    @staticmethod
    def forward(
        ctx: Any, node: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, layer: RowParallelLinear
    ) -> Tensor:
        y = layer.mesh.reduce(matmul(_by_rank(x, layer), weight)).wait()
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
        places, others = _held_places(mesh.by_rank(tokens), start, weight.shape[0])
        held = F.embedding(places.masked_fill(others, 0), weight).masked_fill_(others.unsqueeze(-1), 0.0)
        return mesh.reduce(held).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        (tokens,), mesh, count = ctx.saved_tensors, ctx.mesh, ctx.count
        whole = mesh.gather(grad)
        places, others = _held_places(mesh.by_rank(tokens), ctx.start, count)
        # Other ranks' tokens go to a row more, which is left out as padding.
        places = places.masked_fill(others, count)
        rows = torch.ops.aten.embedding_dense_backward(whole.wait(), places, count + 1, count, False)
        return None, rows[:count], None, None


def _held_places(tokens: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Return where this rank holds each token, and which tokens it does not hold."""
    places = tokens - start
    return places, (places < 0) | (places >= count)


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _by_rank(x: Tensor, layer: RowParallelLinear) -> Tensor:
    return layer.mesh.by_rank(x) if layer.ordered else x


def _now_or_later(
    queue: WeightGradientQueue | None, parameter: nn.Parameter, begin: Callable[[], Callable[[], Tensor]], product: Any
) -> Tensor | None:
    """Return the gradient of `parameter`, or None and put it off where `product` has not begun."""
    if product is not None:
        return product()
    assert queue is not None
    queue.push(parameter, begin)
    return None
