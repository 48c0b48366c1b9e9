"""The largest tensors besides activations that a step allocates and frees. No torch in here."""

from llmtrain_kernels.accumulate.kept import kept
from llmtrain_kernels.cross_entropy.chunks import chunk_rows, row_stride

from llmtrain.cluster.layout import Axis
from llmtrain.model.tensors import UnitSpec
from llmtrain.plan.facts import Device
from llmtrain.plan.per_rank.roles import Role
from llmtrain.plan.per_rank.saved_tensors import Sizes
from llmtrain.plan.plan import Plan

# Bytes of a token's id, and of its loss.
_ID, _LOSS = 8, 4


def gradient_bytes(plan: Plan, role: Role) -> int:
    """Return the most bytes of gradients that exist at the same time: that wait to be added to their sums, or are
    averaged.

    In the compute dtype, autograd holds one parameter's gradient until it is added; a GPU keeps a unit's small ones.
    That of an embedding which is also the output matrix waits from the head's backward pass to the embedding's. After
    the last backward pass, some runs with tensor parallelism take the mean of all TP-replicated gradients in fp32.
    """
    elements = {unit.name: _waiting_elements(unit, plan.device) for unit in role.units}
    tied = plan.model.tie_embeddings and {"embedding", "head"} <= elements.keys()
    waiting = elements.pop("embedding") if tied else 0
    gradient = (waiting + max(elements.values())) * plan.compute_bytes
    averaged = 0
    if plan.averages_replicas:
        averaged = 4 * sum(unit.replicated_numel for unit in role.units)
    return max(gradient, averaged)


def backward_bytes(plan: Plan) -> int:
    """Return the most bytes that a block's backward pass adds to what the block keeps: the gradient that comes in, and
    that of the activation's input. The gradient of the activation's output takes the place of this output."""
    sizes = Sizes.of(plan)
    return sizes.tokens * (plan.model.hidden + sizes.up) * plan.compute_bytes


def loss_bytes(plan: Plan, role: Role) -> int:
    """Return the most bytes that exist at the same time, besides what the loss keeps: its input with the ids and the
    losses of its tokens, a padded copy of the output matrix if the device needs one, and a chunk's logits with the
    numbers that it makes of them, or with the product that it adds to the fp32 gradient of the output matrix, if it
    does not add by itself. Over a sharded vocabulary, the chunk's gradient is summed over ranks; ranks that share the
    sequence gather the chunk and the next one. 0 without the last stage. Optimizer kernels work in place."""
    if not any(layout.closes for layout in plan.stages_of(role.rank)):
        return 0
    parts, element = plan.grid.degree(Axis.TENSOR), plan.compute_bytes
    vocab = -(-plan.model.vocab // parts)
    tokens = plan.batch.microbatch * plan.batch.sequence_length
    rows = min(chunk_rows(plan.device, vocab), tokens)
    # Over a sharded vocabulary, torch's operations compute the loss on CPUs.
    made = rows * vocab * (plan.kernels.logit if parts == 1 or plan.device == "cuda" else 4)
    product = 0 if plan.kernels.adds_to_fp32 or element == 4 else vocab * plan.model.hidden * element
    width = row_stride(plan.device, vocab)
    # The output matrix, with rows of padding.
    matrix = width * plan.model.hidden * element if width > vocab else 0
    # The chunk, its gradient and that of this rank's share; and the next chunk, if there is one.
    together = (3 + (rows < tokens)) if plan.sequence_parallel else 1
    summed = rows * plan.model.hidden * element * together if parts > 1 else 0
    given = tokens * (plan.model.hidden * element + _ID + _LOSS)
    return given + matrix + summed + rows * width * element + max(made, product)


def _waiting_elements(unit: UnitSpec, device: Device) -> int:
    """Return the most elements of a unit's gradients that wait at the same time."""
    sizes = [end - start for _, start, end in unit.parameter_ranges]
    small = [size for size in sizes if device == "cuda" and kept(size)]
    return max(sum(small) + max((size for size in sizes if not kept(size)), default=0), *sizes)
