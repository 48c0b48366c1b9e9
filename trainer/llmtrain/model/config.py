"""The recipe's `model` section, and the concrete shape of a model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from llmtrain_data.bounds import Factor, Hidden, Layers, SequenceLength, Vocab, Width
from llmtrain_kernels.activation.kinds import Activation
from pydantic import Field, TypeAdapter, ValidationError

Family = Literal["gpt2", "llama", "neox"]
NormEps = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Dropout = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequencies of RoPE for longer sequences than those of pretraining, as Llama 3.1 scales them (Hugging Face's
    rope_type llama3).

    The defaults are Llama 3.1's. factor: by how much channels turn slower that turn seldom. original_positions: longest
    sequence of pretraining. low_freq_factor: channels that turn less often within it are slowed in full.
    high_freq_factor: channels that turn more often stay; those between go over from one to the other.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    factor: Factor = 8.0
    original_positions: SequenceLength = 8192
    low_freq_factor: Factor = 1.0
    high_freq_factor: Factor = 4.0

    def __post_init__(self) -> None:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"model.rope_scaling.low_freq_factor is {self.low_freq_factor}; it must be below high_freq_factor "
                f"({self.high_freq_factor})"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The recipe's `model` section. A key left null takes its value from the preset, the Hugging Face folder or the
    family.

    preset: a published model (`llmtrain recipes show presets` lists them). hf: folder of a Hugging Face model, whose
    sizes and weights the run starts from. family: gpt2 (learned positions, LayerNorm), llama (RoPE, RMSNorm, SwiGLU) or
    neox (RoPE, parallel blocks). layers: transformer blocks. hidden: width of the residual stream. heads: query heads.
    kv_heads: key/value heads that the query heads share (grouped-query attention; family llama). ffn: width of the MLP.
    positions: longest sequence. vocab: rows of the embedding, at least as many as the tokenizer has; null or auto: with
    hf, that model's; else the size of data.tokenizer if it is set, else the preset's. tie_embeddings: whether the head
    uses the embedding's weights. norm_eps: added to the variance in norms. rope_theta: base of RoPE's wavelengths.
    rope_scaling: RoPE's frequencies for longer sequences than those of pretraining. rotary_fraction: share of a head's
    channels that RoPE rotates. activation: activation of the MLP, for gpt2 and neox; gelu_tanh is the tanh form that
    GPT-2 and GPT-NeoX-20B were trained with. dropout: probability, in training.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    preset: str | None = None
    hf: str | None = None
    family: Family | None = None
    layers: Layers | None = None
    hidden: Hidden | None = None
    heads: Hidden | None = None
    kv_heads: Hidden | None = None
    ffn: Width | None = None
    positions: SequenceLength | None = None
    vocab: Vocab | Literal["auto"] | None = None
    tie_embeddings: bool | None = None
    norm_eps: NormEps | None = None
    rope_theta: Factor | None = None
    rope_scaling: RopeScaling | None = None
    rotary_fraction: Fraction | None = None
    activation: Literal["gelu", "gelu_tanh"] | None = None
    dropout: Dropout | None = None


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The concrete shape of a decoder-only transformer.

    hidden: width of the residual stream. heads, kv_heads: query heads, and key/value heads that they share
    (grouped-query attention). ffn: width of the MLP. positions: longest sequence. vocab: rows of the embedding.
    rope_scaling: None leaves RoPE's frequencies as rope_theta gives them. rotary_fraction: share of a head's channels
    that RoPE rotates (neox, llama). activation: the MLP's activation
    function; gelu_tanh is the tanh form that GPT-2 and GPT-NeoX-20B were trained with, swiglu is family llama's.
    """

    # An unknown size means that the model computes something else.
    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    family: Family
    layers: Layers
    hidden: Hidden
    heads: Hidden
    kv_heads: Hidden
    ffn: Width
    positions: SequenceLength
    vocab: Vocab
    tie_embeddings: bool
    norm_eps: NormEps
    rope_theta: Factor
    rotary_fraction: Fraction
    activation: Activation
    dropout: Dropout
    rope_scaling: RopeScaling | None = None

    @classmethod
    def of(cls, sizes: Mapping[str, Any]) -> "GPTConfig":
        """Return the shape of these sizes, which may be untrusted. Raises ValueError with one sentence."""
        try:
            # Read as JSON: pydantic's strict mode accepts a mapping only from JSON, not from Python.
            return _adapter().validate_json(json.dumps(dict(sizes)), strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if first["type"] == "value_error":
                raise ValueError(str(first["ctx"]["error"])) from None
            key = ".".join(("model", *map(str, first["loc"])))
            if first["type"] == "unexpected_keyword_argument":
                known = ", ".join(entry.name for entry in fields(cls))
                raise ValueError(f"{key} is no size of a model; expected {known}") from None
            message = first["msg"].removeprefix("Input should be ")
            raise ValueError(f"{key} is {str(first['input'])[:40]}; expected {message}") from None

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"model.hidden is {self.hidden}; it must be a multiple of model.heads ({self.heads})")
        if self.heads % self.kv_heads:
            raise ValueError(f"model.heads is {self.heads}; it must be a multiple of model.kv_heads ({self.kv_heads})")
        if self.family != "llama" and self.kv_heads != self.heads:
            raise ValueError(f"model.kv_heads is {self.kv_heads}; only family llama shares key/value heads")
        if self.family != "gpt2" and (self.rotary_dim % 2 or self.rotary_dim < 2):
            raise ValueError(
                f"model.rotary_fraction is {self.rotary_fraction}; it must give an even number of at least 2 of the "
                f"{self.head_dim} channels of a head"
            )
        if (self.family == "llama") != (self.activation == "swiglu"):
            raise ValueError(
                f"model.activation is {self.activation}; family llama, and no other, has swiglu; leave "
                "model.activation out"
            )

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.hidden // self.heads

    @property
    def rotary_dim(self) -> int:
        """Channels of one head that RoPE rotates."""
        return int(self.head_dim * self.rotary_fraction)


@cache
def _adapter() -> TypeAdapter[GPTConfig]:
    return TypeAdapter(GPTConfig)


def may_differ(family: Family, weights_alone: bool) -> frozenset[str]:
    """Return the keys of GPTConfig that may differ between a model and one whose states it takes.

    weights_alone: it takes no optimizer states, and is trained further with other frequencies of RoPE, for longer
    sequences: a higher theta (Code Llama, section 2.4), or scaled frequencies (Llama 3.1).
    """
    if family == "gpt2":
        return frozenset({"dropout"})
    longer = {"rope_theta", "rope_scaling"} if weights_alone else set()
    return frozenset({"dropout", "positions", *longer})
