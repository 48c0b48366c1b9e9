"""The small models that tensor-parallel ranks train. Imports only what ranks and tests both need."""

from dataclasses import replace
from typing import Any

import torch
from llmtrain.model.config import GPTConfig
from torch import Tensor

BATCH, SEQUENCE, STEPS = 3, 12, 5
Figures = dict[str, Any]
# Blocks recomputed together, and whether weight gradients are deferred.
VARIANTS = {"plain": (0, False), "recomputed": (1, False), "deferred": (0, True), "both": (2, True)}

_GPT2 = GPTConfig(
    family="gpt2", layers=2, hidden=32, heads=8, kv_heads=8, ffn=48, positions=16, vocab=61, tie_embeddings=True,
    norm_eps=1e-5, rope_theta=1e4, rotary_fraction=1.0, activation="gelu_tanh", dropout=0.0,
)  # fmt: skip
_LLAMA = replace(_GPT2, family="llama", kv_heads=4, activation="swiglu", tie_embeddings=False)
_NEOX = replace(_GPT2, family="neox", rotary_fraction=0.5, activation="gelu", tie_embeddings=False)
_CONFIGS = {
    "gpt2": _GPT2,
    "gpt2 untied": replace(_GPT2, tie_embeddings=False),
    "llama": _LLAMA,
    "llama tied": replace(_LLAMA, tie_embeddings=True),
    "neox": _NEOX,
}
# Train fewer models on more ranks than there are cores.
CASES = {2: tuple(_CONFIGS), 4: ("gpt2", "llama")}


def config_of(name: str) -> GPTConfig:
    """Return the model of a case."""
    return _CONFIGS[name]


def tokens(config: GPTConfig, step: int) -> tuple[Tensor, Tensor]:
    """Return a step's inputs and targets, `[BATCH, SEQUENCE]`, with a pattern that a model can learn."""
    random = torch.Generator().manual_seed(step % 2)
    rows = (torch.randint(1, 4, (BATCH, SEQUENCE + 1), generator=random).cumsum(1) * 7) % config.vocab
    return rows[:, :-1], rows[:, 1:]
