"""Map the tensors of a Hugging Face model to canonical tensors: names, and how to join and split them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

import torch

from llmtrain.model.config import GPTConfig
from llmtrain.model.tensors import TensorSpec, model_units

# A tensor's name within a layer, the canonical tensors stacked in it, and the form; {n} stands for q, k and v.
_Row = tuple[str, str, Literal["same", "transposed", "interleaved"]]
_ROWS: dict[str, tuple[_Row, ...]] = {
    "gpt2": (
        ("ln_1.weight", "norm1.weight", "same"),
        ("ln_1.bias", "norm1.bias", "same"),
        ("attn.c_attn.weight", "attention.{n}.weight", "transposed"),
        ("attn.c_attn.bias", "attention.{n}.bias", "same"),
        ("attn.c_proj.weight", "attention.out.weight", "same"),
        ("attn.c_proj.bias", "attention.out.bias", "same"),
        ("ln_2.weight", "norm2.weight", "same"),
        ("ln_2.bias", "norm2.bias", "same"),
        ("mlp.c_fc.weight", "mlp.up.weight", "transposed"),
        ("mlp.c_fc.bias", "mlp.up.bias", "same"),
        ("mlp.c_proj.weight", "mlp.down.weight", "same"),
        ("mlp.c_proj.bias", "mlp.down.bias", "same"),
    ),
    "llama": (
        ("input_layernorm.weight", "norm1.weight", "same"),
        ("self_attn.q_proj.weight", "attention.q.weight", "same"),
        ("self_attn.k_proj.weight", "attention.k.weight", "same"),
        ("self_attn.v_proj.weight", "attention.v.weight", "same"),
        ("self_attn.o_proj.weight", "attention.out.weight", "transposed"),
        ("post_attention_layernorm.weight", "norm2.weight", "same"),
        ("mlp.gate_proj.weight", "mlp.gate.weight", "same"),
        ("mlp.up_proj.weight", "mlp.up.weight", "same"),
        ("mlp.down_proj.weight", "mlp.down.weight", "transposed"),
    ),
    "neox": (
        ("input_layernorm.weight", "norm1.weight", "same"),
        ("input_layernorm.bias", "norm1.bias", "same"),
        ("attention.query_key_value.weight", "attention.{n}.weight", "interleaved"),
        ("attention.query_key_value.bias", "attention.{n}.bias", "interleaved"),
        ("attention.dense.weight", "attention.out.weight", "transposed"),
        ("attention.dense.bias", "attention.out.bias", "same"),
        ("post_attention_layernorm.weight", "norm2.weight", "same"),
        ("post_attention_layernorm.bias", "norm2.bias", "same"),
        ("mlp.dense_h_to_4h.weight", "mlp.up.weight", "same"),
        ("mlp.dense_h_to_4h.bias", "mlp.up.bias", "same"),
        ("mlp.dense_4h_to_h.weight", "mlp.down.weight", "transposed"),
        ("mlp.dense_4h_to_h.bias", "mlp.down.bias", "same"),
    ),
}
# Tensors outside the layers: canonical name to Hugging Face name.
_ENDS = {
    "gpt2": {
        "embedding.tokens": "transformer.wte.weight",
        "embedding.positions": "transformer.wpe.weight",
        "head.norm.weight": "transformer.ln_f.weight",
        "head.norm.bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
    },
    "llama": {
        "embedding.tokens": "model.embed_tokens.weight",
        "head.norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    },
    "neox": {
        "embedding.tokens": "gpt_neox.embed_in.weight",
        "head.norm.weight": "gpt_neox.final_layer_norm.weight",
        "head.norm.bias": "gpt_neox.final_layer_norm.bias",
        "head.weight": "embed_out.weight",
    },
}
_LAYER = {
    "gpt2": "transformer.h.{layer}.",
    "llama": "model.layers.{layer}.",
    "neox": "gpt_neox.layers.{layer}.",
}


class Sliced(Protocol):
    """A tensor, or one in a file, of which slices are read."""

    def __getitem__(self, part: slice | tuple[slice, slice], /) -> torch.Tensor:
        """Return a slice."""


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a Hugging Face model: canonical tensors stacked along dim 0, then changed into a form.

    form: `same`; `transposed`; or `interleaved`, heads first, `[heads, 3, head_dim, ...]`, as NeoX fuses Q, K and V.
    """

    name: str
    parts: tuple[TensorSpec, ...]
    form: Literal["same", "transposed", "interleaved"]
    heads: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the Hugging Face model."""
        stacked = (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])
        return stacked[::-1] if self.form == "transposed" else stacked

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the Hugging Face tensor of shape `shape`, contiguous, from the canonical tensors."""
        stacked = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        if self.form == "transposed":
            stacked = stacked.T
        elif self.form == "interleaved":
            # Split dim 0 into `[parts, heads, rest]`, and put the heads first.
            stacked = stacked.unflatten(0, (len(parts), self.heads, -1)).transpose(0, 1).flatten(0, 2)
        return stacked.contiguous()

    def rows(self, index: int, first: int, last: int, stored: Sliced) -> torch.Tensor:
        """Return the rows `[first, last)` of the canonical tensor `parts[index]`, a view where the form allows it.

        stored: the Hugging Face tensor, of shape `shape`. Takes no other elements of it.
        """
        if self.form == "interleaved":
            size, inner = self.parts[index].shape[0] // self.heads, len(self.parts)
            heads = range(first // size, -(-last // size))
            # From a row of the part to the same row among the heads of all parts.
            shifts = {head: (head * (inner - 1) + index) * size for head in heads}
            ends = {head: (max(first, head * size), min(last, (head + 1) * size)) for head in heads}
            return torch.cat([stored[ends[h][0] + shifts[h] : ends[h][1] + shifts[h]] for h in heads])
        before = sum(part.shape[0] for part in self.parts[:index])
        if self.form == "transposed":
            return stored[:, before + first : before + last].T
        return stored[before + first : before + last]


def hf_layout(config: GPTConfig) -> list[HFTensor]:
    """Return the tensors of the Hugging Face model for `config`, in the order of the forward pass."""
    specs = {tensor.name: tensor for unit in model_units(config) for tensor in unit.tensors}
    ends = [
        HFTensor(name, (specs[canonical],), "same", config.heads)
        for canonical, name in _ENDS[config.family].items()
        if canonical in specs
    ]
    first = [tensor for tensor in ends if tensor.parts[0].name.startswith("embedding.")]
    layers = [_of_layer(config, specs, layer, row) for layer in range(config.layers) for row in _ROWS[config.family]]
    return [*first, *layers, *ends[len(first) :]]


def _of_layer(config: GPTConfig, specs: dict[str, TensorSpec], layer: int, row: _Row) -> HFTensor:
    name, canonical, form = row
    names = [canonical.format(n=n) for n in "qkv"] if "{n}" in canonical else [canonical]
    parts = tuple(specs[f"blocks.{layer}.{part}"] for part in names)
    return HFTensor(_LAYER[config.family].format(layer=layer) + name, parts, form, config.heads)
