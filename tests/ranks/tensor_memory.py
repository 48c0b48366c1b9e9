"""Bytes of activations that tensor-parallel ranks keep for the backward pass, measured and by formula."""

from collections.abc import Callable, Sequence

import torch
from llmtrain.model.config import GPTConfig
from torch import Tensor


def kept_bytes(forward: Callable[[], object], others: Sequence[Tensor]) -> int:
    """Return the bytes that autograd saves in a forward pass, without memory that is shared with `others`."""
    skipped = {tensor.untyped_storage().data_ptr() for tensor in others}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in skipped:
            # Hold the tensors, so that no later one gets the same memory.
            kept[place] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    del result
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def block_bytes(config: GPTConfig, batch: int, sequence: int, degree: int, sharded: bool) -> float:
    """Return the bytes that a rank keeps of one block in fp32, without dropout or recomputation.

    With b sequences of s tokens, hidden size h, MLP width f, a query and k key/value heads of width d, and t ranks:

    - The input of each column-parallel product and of the norm before it: 4 b s h elements, or 3 b s h if both norms
      have the same input (neox). Each rank saves all of them; with sequence parallelism it saves 1/t, and gathers the
      full input again in the backward pass.
    - In attention: Q, K and V, b s (a + 2 k) d, and the output, b s h, which the next product saves too. In the MLP:
      the values before and after the nonlinearity, 2 b s f, or 3 b s f with a gate. Each rank saves 1/t of these.
    - In fp32, whatever the compute dtype: each norm's statistics, two per token for LayerNorm and one for RMSNorm,
      sharded like the tokens; and attention's normalizers, b s a, of which each rank saves 1/t.

    Korthikanti et al. 2022 count the same (equations 2 and 4, without the attention core, which flash attention does
    not save). Of their 10 s b h bytes that only sequence parallelism divides, 8 are the 4 b s h elements in 16 bits and
    2 are dropout's masks; of the 24 s b h / t, 6 are Q, K and V, 2 attention's output and 16 the MLP's with f = 4 h.
    """
    tokens, gated = batch * sequence, config.activation == "swiglu"
    everywhere = tokens * config.hidden * (3 if config.family == "neox" else 4)
    everywhere += tokens * 2 * (1 if config.family == "llama" else 2)
    attention = tokens * ((config.heads + 2 * config.kv_heads) * config.head_dim + config.hidden + config.heads)
    inside = attention + tokens * config.ffn * (3 if gated else 2)
    return 4 * (everywhere / (degree if sharded else 1) + inside / degree)
