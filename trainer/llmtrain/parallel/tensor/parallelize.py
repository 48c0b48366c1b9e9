"""Turns a plain model into this rank's share of a tensor-parallel one."""

from llmtrain.model.gpt import GPT
from llmtrain.model.layers import MLP, Block
from llmtrain.parallel.tensor.collectives import TensorMesh
from llmtrain.parallel.tensor.cross_entropy import VocabParallelHead
from llmtrain.parallel.tensor.layers import (
    ColumnParallelLinear,
    ParallelAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from llmtrain.parallel.weight_gradients import WeightGradientQueue, split_backward


def parallelize(model: GPT, mesh: TensorMesh, queue: WeightGradientQueue | None = None) -> None:
    """Replace, in place, the layers of a model on the meta device that tensor parallelism shards.

    Parameters keep their names and take the shapes of `UnitSpec.slice(mesh.tensor_rank, mesh.degree)`. The gradients of
    parameters that are not sharded are equal on all ranks, or, with `mesh.sequence`, partial sums that have to be added
    over the ranks. queue: where the blocks defer their weight gradients, with one rank as well; None: they never do.
    """
    if mesh.degree == 1:
        if queue is None:
            return
        if not model.groups:
            split_backward(model.blocks, queue)
            return
    # With recomputation, one rank uses these layers as well: they do not recompute the last product of a block.
    config, queue = model.config, queue or WeightGradientQueue()
    # First the embedding and the head, which are sharded along the vocabulary.
    if mesh.degree > 1 and model.embedding is not None:
        model.embedding = VocabParallelEmbedding(config, mesh)
    if mesh.degree > 1 and model.head is not None:
        model.head = VocabParallelHead(config, mesh)
    # Then the linear layers of each block. Norms and residual sums work on any tokens.
    for block in model.blocks.values():
        assert isinstance(block, Block)
        block.attention = ParallelAttention(config, mesh, queue)
        _parallelize_mlp(block.mlp, config.hidden, mesh, queue)


def _parallelize_mlp(mlp: MLP, hidden: int, mesh: TensorMesh, queue: WeightGradientQueue) -> None:
    (width, _), (ffn, _), bias = mlp.up.weight.shape, mlp.down.weight.shape, mlp.up.bias is not None
    mlp.up = ColumnParallelLinear(hidden, width, bias, mesh, queue)  # type: ignore[assignment]
    mlp.down = RowParallelLinear(ffn, hidden, bias, mesh, queue)  # type: ignore[assignment]
