"""Output projection and cross-entropy over a vocabulary that is sharded over tensor-parallel ranks, in chunks of rows.

For each chunk, a rank computes the logits of its own part of the vocabulary. The ranks then exchange three numbers per
row. As in `llmtrain_kernels.cross_entropy`, the forward pass computes the gradients too, while it has a chunk's logits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from llmtrain_kernels.cross_entropy.op import add_product, padded, rows_on, scaled, unpadded
from llmtrain_kernels.cross_entropy.partial import partial_losses
from llmtrain_kernels.matmul import linear, matmul
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain.cluster.layout import even_share
from llmtrain.model.config import GPTConfig
from llmtrain.model.layers import Head, empty_parameter
from llmtrain.parallel.tensor.collectives import Pending, TensorMesh


class VocabParallelHead(Head):
    """The final norm, and this rank's share of the rows of the output matrix."""

    def __init__(self, config: GPTConfig, mesh: TensorMesh) -> None:
        super().__init__(config)
        self.mesh, self.vocab = mesh, config.vocab
        start, end = even_share(config.vocab, mesh.degree, mesh.tensor_rank)
        self.weight = None if config.tie_embeddings else empty_parameter(end - start, config.hidden)

    def forward(self, x: Tensor, embedding: Tensor | None, targets: Tensor | None) -> Tensor:
        """Map this rank's tokens `[batch, sequence or a share of it, hidden]` to the logits of all tokens, or to the
        mean loss of `targets`, int64 `[batch, sequence]`. The result is equal on every rank. embedding: this rank's
        share of the tied matrix.
        """
        (_, x), weight = self.norm(x), embedding if self.weight is None else self.weight
        assert weight is not None
        if targets is None:
            return _all_logits(x, weight, self.mesh, self.vocab)
        return parallel_cross_entropy(x, weight, targets, self.mesh, self.vocab)


def parallel_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, mesh: TensorMesh, vocab: int) -> Tensor:
    """Return the mean cross-entropy (fp32 scalar) of the logits `x @ weight.T` over all ranks' rows of the weight.

    x: `[batch, sequence or this rank's share of it, hidden]`; weight: this rank's `even_share` of `[vocab, hidden]`, of
    the same dtype; targets: int64 `[batch, sequence]`. Collective.
    """
    # All ranks use the same chunks, though some have one more row of the vocabulary.
    rows = rows_on(x.device, -(-vocab // mesh.degree))
    start, _ = even_share(vocab, mesh.degree, mesh.tensor_rank)
    return _ParallelCrossEntropy.apply(x, weight, targets, mesh, start, rows, torch.is_grad_enabled())


@torch.no_grad()
def _all_logits(x: Tensor, weight: Tensor, mesh: TensorMesh, vocab: int) -> Tensor:
    """Return logits `[batch, sequence, vocab]` of all tokens, for sampling. It has no backward pass."""
    logits = mesh.by_sequence(linear(mesh.gather(x).wait(), weight))
    shares = [even_share(vocab, mesh.degree, tensor_rank) for tensor_rank in range(mesh.degree)]
    most = max(end - start for start, end in shares)
    # The gather needs the vocabulary as dim 0, and the same size from every rank.
    own = F.pad(logits, (0, most - logits.shape[-1])).movedim(-1, 0)
    parts = mesh.all_gather(own).wait().chunk(mesh.degree)
    return torch.cat([part[: end - start] for part, (start, end) in zip(parts, shares, strict=True)]).movedim(0, -1)


class _ParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, mesh: TensorMesh, start: int, rows: int, wanted: bool
    ) -> Tensor:
        own, shares = x.flatten(0, 1), mesh.degree if mesh.sharded else 1
        # Each chunk has the same number of tokens from every rank.
        wished, step = mesh.by_rank(targets).reshape(shares, -1) - start, max(1, rows // shares)
        grad_x = torch.empty_like(own) if wanted else None
        vocab, weight = len(weight), padded(weight)
        grad_weight = torch.empty(weight.shape, dtype=torch.float32, device=x.device) if wanted else None
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        all_logits = x.new_empty(min(step, len(own)) * shares, len(weight))
        arriving, leaving = mesh.gather(own[:step]), Pending(lambda: own[:0])
        for first in range(0, len(own), step):
            part, last = arriving.wait(), first + step
            # The next chunk arrives, and the gradient of the previous chunk leaves, during this chunk's computation.
            arriving = mesh.gather(own[last : last + step]) if last < len(own) else arriving
            logits = matmul(part, weight.t(), all_logits[: len(part)])
            total += _losses(logits[:, :vocab], wished[:, first:last].flatten(), mesh, wanted).sum()
            if grad_x is None or grad_weight is None:
                continue
            grad_x[max(0, first - step) : first] = leaving.wait()
            leaving = mesh.reduce(matmul(logits, weight))
            add_product(grad_weight, logits, part, first == 0)
        if grad_x is not None:
            grad_x[(len(own) - 1) // step * step :] = leaving.wait()
            grad_x = grad_x.view_as(x)
        ctx.gradients = (grad_x, None if grad_weight is None else unpadded(grad_weight, vocab))
        ctx.tokens = wished.numel()
        return total / wished.numel()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        (grad_x, grad_weight), scale = ctx.gradients, grad_loss / ctx.tokens
        # They are scaled in place, so a second backward pass through the same graph fails.
        ctx.gradients = None
        return *scaled(grad_x, grad_weight, scale), None, None, None, None, None


def _losses(logits: Tensor, wished: Tensor, mesh: TensorMesh, wanted: bool) -> Tensor:
    """Return each row's cross-entropy over all ranks' logits, fp32. wanted: replace the logits with its gradient.

    wished: each row's target, counted from the first token of this rank's share.
    """
    own = partial_losses(logits, wished)
    tops, sums, targets = mesh.all_gather(own.statistics.unsqueeze(0)).wait().unbind(1)
    highest = tops.amax(0)
    normalizer = (sums * (tops - highest).exp_()).sum(0)
    if wanted:
        own.write_gradient(highest, normalizer)
    return highest + normalizer.log() - targets.sum(0)
