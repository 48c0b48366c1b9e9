"""The recipe's `model` section, and the concrete shape of a model that it resolves to."""

from dataclasses import dataclass
from typing import ClassVar, Literal

Family = Literal["gpt2", "llama", "neox"]
Activation = Literal["gelu", "gelu_tanh", "swiglu"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The recipe's `model` section. A key left null takes its value from the preset, the Hugging Face
    folder or the family; `vocab: auto` takes the tokenizer's size.

    preset: a published model (`llmtrain recipes show presets` lists them).
    hf: folder of a Hugging Face model, whose sizes and weights the run starts from.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    preset: str | None = None
    hf: str | None = None
    family: Family | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    positions: int | None = None
    vocab: int | Literal["auto"] | None = None
    tie_embeddings: bool | None = None
    norm_eps: float | None = None
    rope_theta: float | None = None
    rotary_fraction: float | None = None
    activation: Literal["gelu", "gelu_tanh"] | None = None
    dropout: float | None = None


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The concrete shape of a decoder-only transformer; nothing in it is left to be decided.

    hidden: width of the residual stream. heads, kv_heads: query heads, and key/value heads that they share
    (grouped-query attention). ffn: width of the MLP. positions: longest sequence. vocab: rows of the
    embedding. rotary_fraction: share of a head's channels that RoPE rotates (neox, llama). activation: of
    the MLP; gelu_tanh is the tanh form that GPT-2 and GPT-NeoX-20B were trained with, swiglu is family llama's.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    positions: int
    vocab: int
    tie_embeddings: bool
    norm_eps: float
    rope_theta: float
    rotary_fraction: float
    activation: Activation
    dropout: float

    def __post_init__(self) -> None:
        for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "positions", "vocab"):
            if getattr(self, key) < 1:
                raise ValueError(f"model.{key} is {getattr(self, key)}; it must be at least 1")
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
            raise ValueError(f"model.activation is {self.activation}; family llama, and no other, has swiglu")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout is {self.dropout}; it must be at least 0 and below 1")

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.hidden // self.heads

    @property
    def rotary_dim(self) -> int:
        """Channels of one head that RoPE rotates."""
        return int(self.head_dim * self.rotary_fraction)
