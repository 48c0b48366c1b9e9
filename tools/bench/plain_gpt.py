"""A GPT-2 in plain torch, as a peer of benchmarks: its layers and attention, no kernel of ours."""

import torch
import torch.nn.functional as F
from llmtrain.model.config import GPTConfig
from torch import Tensor, nn


class _Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, self.heads = config.hidden, config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, config.ffn), nn.Linear(config.ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        down: Tensor = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + down


class PlainGPT(nn.Module):
    """A GPT-2 whose output matrix is the token embedding."""

    def __init__(self, config: GPTConfig, sequence: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(sequence, config.hidden)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of the next tokens. tokens: int64 `[batch, sequence]`."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
