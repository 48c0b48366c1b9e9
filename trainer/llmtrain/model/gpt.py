"""The model: plain blocks, no mesh."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmtrain.model.config import GPTConfig
from llmtrain.model.layers import Block, Embedding, Head, rotary_tables


class GPT(nn.Module):
    """Decoder-only transformer of the families gpt2, llama and neox.

    recompute: blocks per activation-checkpointing group, or 0 to keep every activation.
    """

    def __init__(self, config: GPTConfig, device: torch.device, recompute: int = 0) -> None:
        super().__init__()
        self.config, self.recompute = config, recompute
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config)
        self.rotary = None if config.family == "gpt2" else rotary_tables(config, device)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits `[batch, sequence, vocab]`, or, given int64 targets like `tokens`, their mean loss (fp32)."""
        x = self.embedding(tokens)
        group = self.recompute if self.training and torch.is_grad_enabled() else 0
        for first in range(0, len(self.blocks), group or len(self.blocks)):
            last = first + (group or len(self.blocks))
            x = checkpoint(self._run, x, first, last, use_reentrant=False) if group else self._run(x, first, last)
        return self.head(x, self.embedding.tokens, targets)

    def _run(self, x: Tensor, first: int, last: int) -> Tensor:
        for block in self.blocks[first:last]:
            x = block(x, self.rotary)
        return x

    def unit(self, name: str) -> nn.Module:
        """Return the module whose parameters the flat unit `name` holds."""
        return self.get_submodule(name)
