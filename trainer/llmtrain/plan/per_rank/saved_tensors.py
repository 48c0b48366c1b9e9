"""The tensors that one microbatch keeps for its backward pass, by unit. No torch in here.

A tensor counts in the unit that reads it: what one block returns is the input of the next one. Weights never count, and
neither do tokens and the tables of the rotary embedding, which exist for the whole step. Sizes are those of one
tensor-parallel rank. With torch.compile the compiler decides what blocks keep; these are the tensors without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from llmtrain.cluster.layout import Axis, even_share
from llmtrain.plan.plan import Plan


@dataclass(frozen=True)
class Saved:
    """A tensor that is kept, in memory of its own. width: bytes of an element."""

    name: str
    shape: tuple[int, ...]
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.width


def total(tensors: Sequence[Saved]) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a microbatch on one tensor-parallel rank.

    sequences, length: number of sequences of the microbatch, and tokens of each. own: tokens that this rank holds
    between matrix products: a share of them with sequence parallelism. qkv, up: outputs of the products before
    attention and before the activation. ffn: outputs of the activation. vocab: rows of the output matrix.
    """

    sequences: int
    length: int
    own: int
    heads: int
    kv_heads: int
    up: int
    ffn: int
    vocab: int

    @classmethod
    def of(cls, plan: Plan, tensor_rank: int | None = None) -> "Sizes":
        """Return the sizes of the tensor-parallel rank `tensor_rank`, by default the last one, which has the most rows
        of the vocabulary."""
        model, batch, ranks = plan.model, plan.batch, plan.grid.degree(Axis.TENSOR)
        start, end = even_share(model.vocab, ranks, ranks - 1 if tensor_rank is None else tensor_rank)
        ffn = model.ffn // ranks
        return cls(
            sequences=batch.microbatch,
            length=batch.sequence_length,
            own=batch.microbatch * batch.sequence_length // (ranks if plan.sequence_parallel else 1),
            heads=model.heads // ranks,
            kv_heads=model.kv_heads // ranks,
            up=2 * ffn if model.activation == "swiglu" else ffn,
            ffn=ffn,
            vocab=end - start,
        )

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch."""
        return self.sequences * self.length


def embedding_tensors(plan: Plan, sizes: Sizes) -> list[Saved]:
    """Return what the embedding keeps: only the mask of dropout, which llama has none of here."""
    return _mask(plan, sizes, "dropout mask") if plan.model.family != "llama" else []


def block_tensors(plan: Plan, sizes: Sizes) -> list[Saved]:
    """Return what one block keeps without recomputation. The first tensor is the block's input."""
    width, own = plan.compute_bytes, (sizes.own, plan.model.hidden)
    after_attention = [] if plan.model.family == "neox" else [Saved("sum after attention", own, width)]
    return [
        Saved("input", own, width),
        *_statistics(plan, sizes, "norm1"),
        Saved("norm1's output", own, width),
        *_attention_tensors(plan, sizes),
        *_mask(plan, sizes, "mask after attention"),
        # In neox both norms read the block's input.
        *after_attention,
        *_statistics(plan, sizes, "norm2"),
        Saved("norm2's output", own, width),
        Saved("the activation's input", (sizes.tokens, sizes.up), width),
        Saved("the activation's output", (sizes.tokens, sizes.ffn), width),
        *_mask(plan, sizes, "mask after the MLP"),
    ]


def head_tensors(plan: Plan, sizes: Sizes) -> list[Saved]:
    """Return what the head keeps. The loss computes its gradients in the forward pass, so it keeps no logits."""
    hidden, width = plan.model.hidden, plan.compute_bytes
    return [
        Saved("input", (sizes.own, hidden), width),
        *_statistics(plan, sizes, "norm"),
        Saved("gradient of the norm's output", (sizes.own, hidden), width),
        Saved("gradient of the output matrix", (sizes.vocab, hidden), 4),
        Saved("loss", (), 4),
    ]


def deferred_block_tensors(plan: Plan, sizes: Sizes) -> list[Saved]:
    """Return what one block keeps for the gradients of its weights once its backward pass has run without them.

    Each product keeps its input and the gradient of its output. Gradients of norms, and of the biases that a
    row-parallel product adds, are there already.
    """
    model, width, own = plan.model, plan.compute_bytes, (sizes.own, plan.model.hidden)
    heads = sizes.heads + 2 * sizes.kv_heads
    # neox adds attention and MLP to the same sum, so both outputs have the same gradient, unless dropout masks it.
    shared = model.family == "neox" and not model.dropout
    return [
        Saved("norm1's output", own, width),
        Saved("gradient of queries, keys and values", (sizes.tokens, heads, model.head_dim), width),
        Saved("attention's output", (sizes.tokens, sizes.heads, model.head_dim), width),
        *([] if shared else [Saved("gradient after attention", own, width)]),
        Saved("norm2's output", own, width),
        Saved("gradient of the activation's input", (sizes.tokens, sizes.up), width),
        Saved("the activation's output", (sizes.tokens, sizes.ffn), width),
        Saved("gradient after the MLP", own, width),
        *_norm_gradients(plan, "norm1"),
        *_norm_gradients(plan, "norm2"),
        *(_row_bias_gradients(plan) if model.family != "llama" else []),
    ]


def deferred_end_tensors(plan: Plan, sizes: Sizes, opens: bool, closes: bool) -> list[Saved]:
    """Return the gradients of the embedding and the head that wait until a microbatch's weight gradients are added.
    opens, closes: whether the stage has the embedding, and the head."""
    model, hidden, width = plan.model, plan.model.hidden, plan.compute_bytes
    found = []
    if closes:
        found += [Saved("gradient of the output matrix", (sizes.vocab, hidden), width), *_norm_gradients(plan, "norm")]
    if opens:
        # Tensor-parallel ranks have one more row, for the tokens of other ranks.
        other = 1 if plan.grid.degree(Axis.TENSOR) > 1 else 0
        found.append(Saved("gradient of the tokens", (sizes.vocab + other, hidden), width))
    if opens and model.family == "gpt2":
        found.append(Saved("gradient of the positions", (model.positions, hidden), width))
    return found


def _attention_tensors(plan: Plan, sizes: Sizes) -> list[Saved]:
    model, kernels, width = plan.model, plan.kernels, plan.compute_bytes
    if kernels.attention == "math":
        return _separate_attention_tensors(plan, sizes)
    channels, queries = _padded(model.head_dim, kernels.head_multiple), _padded(sizes.length, kernels.query_multiple)
    product = (sizes.tokens, sizes.heads + 2 * sizes.kv_heads, channels)
    found = [
        # With a rotary embedding two tensors: queries with keys, and values.
        Saved("queries, keys and values", product, width),
        Saved("normalizers", (sizes.sequences, sizes.heads, queries), 4),
        Saved("attention's output", (sizes.tokens, sizes.heads, model.head_dim), width),
        Saved("seeds", (kernels.seeds,), 1),
    ]
    if kernels.attention == "efficient" and model.kv_heads < model.heads:
        # The product stays where queries are a view of it.
        rows = sizes.heads + (2 if kernels.rotates_in_place or model.family == "gpt2" else 1) * sizes.kv_heads
        found[0] = Saved("queries, keys and values", (sizes.tokens, rows, channels), width)
        found.append(Saved("keys and values of each query head", (sizes.tokens, 2 * sizes.heads, channels), width))
    if channels > model.head_dim:
        found.append(Saved("padded output", (sizes.tokens, sizes.heads, channels), width))
    return found


def _separate_attention_tensors(plan: Plan, sizes: Sizes) -> list[Saved]:
    """Return what torch's separate operations keep, which compute attention in fp32."""
    model, heads = plan.model, (sizes.tokens, sizes.heads, plan.model.head_dim)
    weights = (sizes.sequences, sizes.heads, sizes.length, sizes.length)
    # Without a copy in fp32, of a rotary embedding, for shared heads or several sequences of several heads, values are
    # read in place: they are a view of the whole product.
    views = model.family == "gpt2" or (plan.kernels.rotates_in_place and model.kv_heads == model.heads)
    in_place = plan.compute == "fp32" and views and 1 in (sizes.sequences, sizes.heads)
    dropped = [
        Saved("mask of the attention weights", weights, plan.kernels.weights_mask),
        Saved("attention weights after dropout", weights, 4),
    ]
    return [
        Saved("scaled queries", heads, 4),
        Saved("scaled keys of each query head", heads, 4),
        Saved("values of each query head", (sizes.tokens, 3 * sizes.heads, model.head_dim) if in_place else heads, 4),
        Saved("attention weights", weights, 4),
        *(dropped if model.dropout else []),
        Saved("attention's output", heads, plan.compute_bytes),
    ]


def _statistics(plan: Plan, sizes: Sizes, norm: str) -> list[Saved]:
    """LayerNorm keeps each token's mean and inverse deviation, RMSNorm its inverse root mean square."""
    names = ["root mean square"] if plan.model.family == "llama" else ["mean", "deviation"]
    return [Saved(f"{norm}'s {name}", (sizes.own,), plan.kernels.statistic) for name in names]


def _mask(plan: Plan, sizes: Sizes, name: str) -> list[Saved]:
    return [Saved(name, (sizes.own, plan.model.hidden), plan.kernels.mask)] if plan.model.dropout else []


def _norm_gradients(plan: Plan, norm: str) -> list[Saved]:
    names = ["weight"] if plan.model.family == "llama" else ["weight", "bias"]
    return [Saved(f"gradient of {norm}'s {name}", (plan.model.hidden,), plan.compute_bytes) for name in names]


def _row_bias_gradients(plan: Plan) -> list[Saved]:
    # One rank without recomputation has plain layers, which defer the gradients of all biases.
    if plan.grid.degree(Axis.TENSOR) == 1 and not plan.recomputes:
        return []
    names = ("attention.out", "mlp.down")
    return [Saved(f"gradient of {name}'s bias", (plan.model.hidden,), plan.compute_bytes) for name in names]


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
