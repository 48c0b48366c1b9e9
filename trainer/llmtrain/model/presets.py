"""Published models by name. No torch in here.

The papers and model cards named at each group give the sizes. Vocabularies are the published ones; a recipe with
`data.tokenizer` takes the tokenizer's size instead. Dropout is 0 for all models, as is usual for pretraining; GPT-2 and
GPT-3 were published with 0.1.
"""

from collections.abc import Mapping
from types import MappingProxyType

from llmtrain_kernels.activation.kinds import Activation

from llmtrain.model.config import GPTConfig

GPT2_VOCAB = 50257
MEGATRON_VOCAB = 51200  # GPT-2's, padded to a multiple of 1024; the vocabulary of AxoNN and of Holmes


def _gpt2(layers: int, hidden: int, heads: int, positions: int = 1024, vocab: int = GPT2_VOCAB) -> GPTConfig:
    return GPTConfig(
        family="gpt2",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=4 * hidden,
        positions=positions,
        vocab=vocab,
        tie_embeddings=True,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        rotary_fraction=1.0,
        activation="gelu_tanh",
        dropout=0.0,
    )


def _llama(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    *,
    positions: int,
    vocab: int,
    rope_theta: float = 10_000.0,
    tie_embeddings: bool = False,
) -> GPTConfig:
    return GPTConfig(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        positions=positions,
        vocab=vocab,
        tie_embeddings=tie_embeddings,
        norm_eps=1e-5,
        rope_theta=rope_theta,
        rotary_fraction=1.0,
        activation="swiglu",
        dropout=0.0,
    )


def _llama3(layers: int, hidden: int, heads: int, ffn: int, *, positions: int, tied: bool = False) -> GPTConfig:
    return _llama(
        layers,
        hidden,
        heads,
        8,
        ffn,
        positions=positions,
        vocab=128_256,
        rope_theta=500_000.0,
        tie_embeddings=tied,
    )


def _neox(layers: int, hidden: int, heads: int, vocab: int = 50_304, activation: Activation = "gelu") -> GPTConfig:
    return GPTConfig(
        family="neox",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=4 * hidden,
        positions=2048,
        vocab=vocab,
        tie_embeddings=False,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        rotary_fraction=0.25,
        activation=activation,
        dropout=0.0,
    )


# For tests, laptops and first runs: our own sizes, by their number of parameters.
_SMALL = {
    "gpt2-1m": _gpt2(4, 128, 4, positions=256, vocab=2048),
    "gpt2-3m": _gpt2(6, 192, 6, positions=256, vocab=2048),
    "gpt2-10m": _gpt2(6, 320, 5, positions=512, vocab=8192),
    "gpt2-30m": _gpt2(8, 512, 8, vocab=8192),
    "llama-1m": _llama(4, 128, 4, 2, 384, positions=256, vocab=2048, tie_embeddings=True),
    "llama-10m": _llama(6, 320, 5, 5, 896, positions=512, vocab=8192, tie_embeddings=True),
    "neox-1m": _neox(5, 96, 4, vocab=2048),
}

# Radford et al. 2019, table 2, and the released weights.
_GPT2 = {
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-355m": _gpt2(24, 1024, 16),
    "gpt2-774m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
}

# Brown et al. 2020, table 2.1. Its 13B has hidden 5140, which its own 40 heads of 128 do not divide; 5120
# is what that product gives and what later work builds.
_GPT3 = {
    "gpt3-125m": _gpt2(12, 768, 12, positions=2048),
    "gpt3-350m": _gpt2(24, 1024, 16, positions=2048),
    "gpt3-760m": _gpt2(24, 1536, 16, positions=2048),
    "gpt3-1.3b": _gpt2(24, 2048, 16, positions=2048),
    "gpt3-2.7b": _gpt2(32, 2560, 32, positions=2048),
    "gpt3-6.7b": _gpt2(32, 4096, 32, positions=2048),
    "gpt3-13b": _gpt2(40, 5120, 40, positions=2048),
    "gpt3-175b": _gpt2(96, 12288, 96, positions=2048),
}

# Touvron et al. 2023 (Llama 2), Llama team 2024 (Llama 3) and the model cards of 3.2. Positions are those of
# pretraining: 3.1 and 3.2 reach further with a RoPE scaling that is applied afterwards.
_LLAMA = {
    "llama2-7b": _llama(32, 4096, 32, 32, 11_008, positions=4096, vocab=32_000),
    "llama2-13b": _llama(40, 5120, 40, 40, 13_824, positions=4096, vocab=32_000),
    "llama2-70b": _llama(80, 8192, 64, 8, 28_672, positions=4096, vocab=32_000),
    "llama3-8b": _llama3(32, 4096, 32, 14_336, positions=8192),
    "llama3-70b": _llama3(80, 8192, 64, 28_672, positions=8192),
    "llama3.2-1b": _llama3(16, 2048, 32, 8192, positions=8192, tied=True),
    "llama3.2-3b": _llama3(28, 3072, 24, 8192, positions=8192, tied=True),
}

# Biderman et al. 2023 (Pythia), table 1, and Black et al. 2022 (GPT-NeoX-20B).
_NEOX = {
    "pythia-70m": _neox(6, 512, 8),
    "pythia-160m": _neox(12, 768, 12),
    "pythia-410m": _neox(24, 1024, 16),
    "pythia-1b": _neox(16, 2048, 8),
    "pythia-1.4b": _neox(24, 2048, 16),
    "pythia-2.8b": _neox(32, 2560, 32),
    "pythia-6.9b": _neox(32, 4096, 32, vocab=50_432),
    "pythia-12b": _neox(36, 5120, 40, vocab=50_688),
    "gpt-neox-20b": _neox(44, 6144, 64, vocab=50_432, activation="gelu_tanh"),
}

# The characterisation of DeepSpeed ZeRO, Offload and Infinity, section III: hidden 2048, 16 heads, 1024 positions,
# and as many layers as give each size that it names.
_CHARACTERIZED = {
    "deepspeed-1.4b": _gpt2(26, 2048, 16),
    "deepspeed-4.4b": _gpt2(85, 2048, 16),
    "deepspeed-5.2b": _gpt2(101, 2048, 16),
    "deepspeed-5.5b": _gpt2(107, 2048, 16),
    "deepspeed-6.6b": _gpt2(129, 2048, 16),
    "deepspeed-11.4b": _gpt2(224, 2048, 16),
    "deepspeed-33.3b": _gpt2(659, 2048, 16),
}

# AxoNN, table I (sequence 512); MiCS, table 1 (sequence 512, the same blocks trained as BERT and RoBERTa);
# Holmes, table 2 (sequence 2048). MiCS gives its 50B 40 heads, which do not divide its hidden 8192: 64 are built here,
# with the same parameters and products.
_PAPERS = {
    "axonn-12b": _gpt2(48, 4512, 24, positions=512, vocab=MEGATRON_VOCAB),
    "axonn-24b": _gpt2(48, 6336, 36, positions=512, vocab=MEGATRON_VOCAB),
    "axonn-50b": _gpt2(96, 6528, 48, positions=512, vocab=MEGATRON_VOCAB),
    "axonn-100b": _gpt2(96, 9360, 60, positions=512, vocab=MEGATRON_VOCAB),
    "mics-10b": _gpt2(127, 2560, 40, positions=512, vocab=32_008),
    "mics-15b": _gpt2(190, 2560, 40, positions=512, vocab=32_008),
    "mics-20b": _gpt2(64, 5120, 40, positions=512, vocab=32_008),
    "mics-50b": _gpt2(62, 8192, 64, positions=512, vocab=32_008),
    "mics-gpt2-20b": _gpt2(62, 5120, 40, positions=512, vocab=50_265),
    "holmes-3.6b": _gpt2(30, 3072, 32, positions=2048, vocab=MEGATRON_VOCAB),
    "holmes-7.5b": _gpt2(36, 4096, 32, positions=2048, vocab=MEGATRON_VOCAB),
    "holmes-39.1b": _gpt2(48, 8192, 64, positions=2048, vocab=MEGATRON_VOCAB),
}

PRESETS: Mapping[str, GPTConfig] = MappingProxyType(
    {**_SMALL, **_GPT2, **_GPT3, **_LLAMA, **_NEOX, **_CHARACTERIZED, **_PAPERS}
)
