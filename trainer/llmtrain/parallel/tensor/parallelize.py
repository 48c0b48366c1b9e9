"""Makes a plain model this rank's share of a tensor-parallel one."""

from llmtrain.model.gpt import GPT
from llmtrain.model.layers import MLP, Block
from llmtrain.parallel.pipeline.split_backward import split_backward
from llmtrain.parallel.pipeline.weight_gradient_queue import WeightGradientQueue
from llmtrain.parallel.tensor.collectives import TensorMesh
from llmtrain.parallel.tensor.cross_entropy import VocabParallelHead
from llmtrain.parallel.tensor.layers import (
    ColumnParallelLinear,
    ParallelAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
)


def parallelize(model: GPT, mesh: TensorMesh, queue: WeightGradientQueue | None = None) -> None:
    """Replace, in place, the parts of a model on the meta device that tensor parallelism cuts.

    Parameters keep their names and take the shapes of `UnitSpec.slice(mesh.place, mesh.degree)`. What is left whole has
    the same gradient on every rank, or, with `mesh.sequence`, a part of it, to be summed over the ranks. queue: takes
    the products of the blocks' weights, for one rank alone too.
    """
    if mesh.degree == 1 and queue is None:
        return
    if mesh.degree == 1 and queue is not None and not model.recompute:
        split_backward(model.blocks, queue)
        return
    # One rank takes these layers too where blocks are recomputed, without the product that comes last in each.
    config = model.config
    # The ends first: what they hold is cut along the vocabulary.
    if mesh.degree > 1 and model.embedding is not None:
        model.embedding = VocabParallelEmbedding(config, mesh)
    if mesh.degree > 1 and model.head is not None:
        model.head = VocabParallelHead(config, mesh)
    # Then each block's products; norms and residual sums take whatever tokens come.
    for block in model.blocks.values():
        assert isinstance(block, Block)
        block.attention = ParallelAttention(config, mesh, queue)
        _parallelize_mlp(block.mlp, config.hidden, mesh, queue)


def _parallelize_mlp(mlp: MLP, hidden: int, mesh: TensorMesh, queue: WeightGradientQueue | None) -> None:
    (width, _), (ffn, _), bias = mlp.up.weight.shape, mlp.down.weight.shape, mlp.up.bias is not None
    mlp.up = ColumnParallelLinear(hidden, width, bias, mesh, queue)  # type: ignore[assignment]
    mlp.down = RowParallelLinear(ffn, hidden, bias, mesh, queue)  # type: ignore[assignment]
